"""Fingerprints: stable between processes, two int32 words, and never the empty tag."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_neuron_cache.encoder_cache import identity
from vllm_neuron_cache.encoder_cache.identity import EMPTY_TAG, Fingerprint, mm_hash_fingerprint

keys = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


class ChosenDigest:
    """Stands in for a hash whose digest the test chooses."""

    def __init__(self, digest: bytes) -> None:
        self._digest = digest

    def digest(self) -> bytes:
        return self._digest


def fingerprint_of_digest(monkeypatch, digest: bytes) -> Fingerprint:
    monkeypatch.setattr(identity.hashlib, "blake2b", lambda data, digest_size: ChosenDigest(digest))
    return mm_hash_fingerprint("any")


@pytest.mark.parametrize(
    "key, fingerprint",
    [
        ("", (-458842025, 1954132660)),
        ("a", (1090035257, 1533428271)),
        ("b", (-2072853789, 1300582261)),
        ("image-\u00e9", (856173225, 253841854)),
    ],
)
def test_a_key_has_the_same_fingerprint_in_every_process_and_version(key, fingerprint):
    assert mm_hash_fingerprint(key) == fingerprint


@given(keys)
def test_the_two_words_are_the_digest_from_its_first_byte_on(key):
    high, low = mm_hash_fingerprint(key)
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    assert high.to_bytes(4, "big", signed=True) + low.to_bytes(4, "big", signed=True) == digest


@given(keys)
def test_a_fingerprint_is_never_empty_and_fits_two_int32_words(key):
    fingerprint = mm_hash_fingerprint(key)
    assert fingerprint != EMPTY_TAG
    assert tuple(np.array(fingerprint, dtype=np.int32).tolist()) == fingerprint


@given(st.sets(keys, max_size=50))
def test_different_keys_have_different_fingerprints(some_keys):
    assert len({mm_hash_fingerprint(key) for key in some_keys}) == len(some_keys)


def test_the_empty_tag_is_two_zero_words():
    assert EMPTY_TAG == (0, 0)


def test_a_key_whose_digest_is_zero_does_not_read_as_empty(monkeypatch):
    assert fingerprint_of_digest(monkeypatch, bytes(8)) == (0, 1)


@pytest.mark.parametrize(
    "digest, fingerprint",
    [
        (b"\x00\x00\x00\x00\x00\x00\x00\x07", (0, 7)),
        (b"\x00\x00\x00\x07\x00\x00\x00\x00", (7, 0)),
        (b"\xff\xff\xff\xff\x80\x00\x00\x00", (-1, -(2**31))),
    ],
)
def test_one_word_of_zero_is_kept(monkeypatch, digest, fingerprint):
    assert fingerprint_of_digest(monkeypatch, digest) == fingerprint


def test_half_a_surrogate_pair_has_a_fingerprint():
    assert mm_hash_fingerprint("\ud800") != mm_hash_fingerprint("\ud801")

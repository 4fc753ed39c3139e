"""Keys and clients' ids keep apart what differs. Fingerprints: stable, two int32 words, and never the empty tag."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_neuron_cache.encoder_cache import identity
from vllm_neuron_cache.encoder_cache.identity import (
    CLIENT_ID,
    EMPTY_TAG,
    Adapter,
    Fingerprint,
    cache_key,
    mm_hash_fingerprint,
    tenant_client_id,
    tenant_hash,
)

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


# Clients' ids and hashes of tenants ----------------------------------------------------------------------------

salts = st.none() | st.text(max_size=10)
any_text = st.text(max_size=20)  # also half surrogate pairs, which JSON carries


@given(st.sets(st.tuples(any_text, salts), max_size=20))
def test_every_client_id_of_every_tenant_stands_for_something_of_its_own(ids):
    assert len({tenant_client_id(*id_) for id_ in ids}) == len(ids)
    assert all(tenant_client_id(*id_).startswith(CLIENT_ID) for id_ in ids)


@given(st.sets(st.tuples(any_text, salts), max_size=20))
def test_no_two_tenants_share_a_hash(hashes):
    assert len({tenant_hash(f"hash-{mm_hash}", salt) for mm_hash, salt in hashes}) == len(hashes)


@given(any_text, salts, salts)
def test_a_clients_id_and_a_hash_are_never_the_same(text, salt, other):
    client_id = tenant_client_id(text, salt)
    assert client_id != text and client_id not in {tenant_hash(f"hash-{text}", other), f"hash-{text}"}


def test_without_a_salt_a_hash_stays_and_a_clients_id_has_its_tenant_in_it_already():
    assert tenant_hash("hash", None) == "hash"
    assert tenant_hash("hash", "") != "hash"
    client_id = tenant_client_id("a", "one")
    assert tenant_hash(client_id, "one") == client_id
    assert tenant_client_id("a", None) != tenant_client_id("a", "")


# Cache keys ----------------------------------------------------------------------------------------------------

ADAPTER = Adapter("name", "/path", 1)


def test_the_key_is_the_hash_while_nothing_else_tells_items_apart():
    assert cache_key("hash", 5) == "hash" == cache_key("hash", 6)


@pytest.mark.parametrize(
    "difference",
    [
        {"salt": "one"},
        {"salt": ""},
        {"adapter": ADAPTER},
        {"adapter": ADAPTER._replace(name="other")},
        {"adapter": ADAPTER._replace(path="/other")},
        {"adapter": ADAPTER._replace(id=2)},
        {"weights_epoch": 1},
        {"weights_epoch": 2},
        {"salt": "one", "weights_epoch": 1},
    ],
)
def test_every_part_of_a_key_counts(difference):
    others = [{}, {"salt": "two"}, {"adapter": ADAPTER._replace(id=7)}, {"weights_epoch": 9}]
    key = cache_key("hash", 5, **difference)
    assert key not in [cache_key("hash", 5, **other) for other in others]
    assert key != cache_key("other hash", 5, **difference)
    assert key == cache_key("hash", 6, **difference)


def test_the_size_counts_where_a_client_chose_the_id():
    client_id = tenant_client_id("a", None)
    assert len({cache_key(client_id, 5), cache_key(client_id, 6), client_id}) == 3

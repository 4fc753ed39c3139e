"""Fingerprints of cache keys, for the tags beside the buffer."""

import hashlib
from typing import NamedTuple

import numpy as np


class Fingerprint(NamedTuple):
    """64 bits of a key as two int32 words; (0, 0) is never one, because it means 'empty' in a tag."""

    high: int
    low: int


EMPTY_TAG = Fingerprint(0, 0)


def mm_hash_fingerprint(key: str) -> Fingerprint:
    """Maps a key to its fingerprint. Two words, since device scatters have no 64-bit integers."""
    # A client's own id may hold half a surrogate pair, which JSON can carry and UTF-8 cannot.
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    high, low = np.frombuffer(digest, dtype=">i4").tolist()
    return Fingerprint(high, low) if (high, low) != EMPTY_TAG else Fingerprint(0, 1)

"""What makes two items the same: cache keys, the ids that clients choose, and fingerprints for the tags.

A key covers content, tenant, adapter and weights, and is the same for KV blocks, scheduler, workers and readers
outside the process. `mm_hash` itself, vLLM's hash of the content, stays the key of the processor cache.
"""

import hashlib
import json
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


def tag_generation(generation: int) -> int:
    """A generation as a tag has it, int32. One that has outgrown it wraps, which a reader compares just as well."""
    return generation & 0x7FFFFFFF


class Adapter(NamedTuple):
    """A LoRA adapter that changes what the encoder returns. One of the same name may be loaded from another path."""

    name: str
    path: str
    id: int


CLIENT_ID = "client:"
"""How an `mm_hash` begins that stands for an id which a client chose, instead of for content."""

_TENANT_HASH = "tenant:"
_KEY = "key:"


def tenant_client_id(client_id: str, salt: str | None) -> str:
    """What stands in vLLM for a client's own id: different for every tenant, and never the hash of any content."""
    return CLIENT_ID + _digest(client_id, salt)


def tenant_hash(mm_hash: str, salt: str | None) -> str:
    """What stands for an item's content in the processor cache: the hash itself, or one that only its tenant meets.

    A cache that tenants share answers faster to whoever sends what another has sent.
    """
    if salt is None or mm_hash.startswith(CLIENT_ID):  # whose id it is, is in the id already
        return mm_hash
    return _TENANT_HASH + _digest(mm_hash, salt)


def cache_key(
    mm_hash: str, num_tokens: int, *, salt: str | None = None, adapter: Adapter | None = None, weights_epoch: int = 0
) -> str:
    """The key of an item of `num_tokens` rows. `mm_hash` itself while nothing else tells items apart.

    An id that a client chose does not follow from the content, so that the number of rows is part of its key: media of
    another size under the same id can then never be taken for what was there before.
    """
    by_client = mm_hash.startswith(CLIENT_ID)
    if salt is None and adapter is None and not weights_epoch and not by_client:
        return mm_hash
    return _KEY + _digest(mm_hash, salt, adapter, weights_epoch, num_tokens if by_client else None)


def _digest(*parts: object) -> str:
    # JSON separates the parts, and escapes half surrogate pairs, which a client's id may hold and UTF-8 cannot.
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=32).hexdigest()

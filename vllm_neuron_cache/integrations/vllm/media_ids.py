"""Ids that clients choose for their media: kept apart by tenant, and held to what was first sent under them.

vLLM takes such an id for the content itself, in the processor cache too: it would answer a second client, or a second
picture, with what came first.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import Any, NamedTuple

from cachetools import LRUCache
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.cache import BaseMultiModalProcessorCache
from vllm.multimodal.parse import ImageProcessorItems, ModalityDataItems

from vllm_neuron_cache.encoder_cache.identity import CLIENT_ID, tenant_client_id, tenant_hash
from vllm_neuron_cache.errors import ItemIdReusedError

MAX_REMEMBERED_IDS = 65_536


class ItemIdReusedRefusal(VLLMValidationError, ItemIdReusedError):
    """`ItemIdReusedError` as vLLM's servers know it: HTTP 400."""


class SaltedIds(dict):
    """A prompt's `multi_modal_uuids`, with the salt that vLLM does not hand on to where they are used."""

    def __init__(self, ids: Mapping[str, Any] | None, salt: str | None) -> None:
        super().__init__(ids or {})
        self.salt = salt


class IdKey(NamedTuple):
    """What an id is remembered by."""

    tenant_id: str
    aside: bool
    """Whether the request used vLLM's second processor cache, which never meets the engine."""


class SeenMedia(NamedTuple):
    """What was first sent under an id. vLLM would take a video for the picture that has the same id."""

    modality: str
    size: tuple
    mm_hash: str


class IdMemory:
    """The sizes of the media that were first sent under the last `MAX_REMEMBERED_IDS` ids. Threads may share it."""

    def __init__(self, max_ids: int = MAX_REMEMBERED_IDS) -> None:
        self._seen: LRUCache[IdKey, SeenMedia] = LRUCache(max_ids)
        self._lock = Lock()

    def get(self, key: IdKey) -> SeenMedia | None:
        with self._lock:
            return self._seen.get(key)

    def add(self, seen: Mapping[IdKey, SeenMedia]) -> None:
        with self._lock:
            self._seen.update(seen)

    def forget(self, mm_hashes: set[str]) -> None:
        """Forgets the ids behind these hashes: their media never reached the engine."""
        with self._lock:
            for key in [key for key, seen in self._seen.items() if seen.mm_hash in mm_hashes]:
                del self._seen[key]


class Arrival:
    """The ids and hashes of one request, while vLLM processes its media. Enter `active` around that."""

    def __init__(
        self,
        mm_uuids: Mapping[str, Any] | None,
        memory: IdMemory,
        cache: BaseMultiModalProcessorCache | None,
        *,
        aside: bool,
    ) -> None:
        """`mm_uuids` without a salt are those of an unsalted request; `cache` is vLLM's; `aside` as in `IdKey`."""
        self.salt: str | None = getattr(mm_uuids, "salt", None)
        self._memory = memory
        self._cache = cache
        self._aside = aside
        self._written: dict[str, str] = {}
        self._seen: dict[IdKey, SeenMedia] = {}
        self._new_hashes: set[str] = set()
        self.mm_uuids = {modality: self._tenant_ids(ids) for modality, ids in mm_uuids.items()} if mm_uuids else None
        """What to give to vLLM in place of the client's ids."""

    @contextmanager
    def active(self) -> Iterator[None]:
        token = _arrival.set(self)
        try:
            yield
        finally:
            _arrival.reset(token)

    def check_and_map(
        self, modality: str, items: ModalityDataItems, uuids: list[str | None], mm_hashes: list[str]
    ) -> list[str]:
        """What vLLM shall know the items by, in place of their `mm_hashes`.

        Raises `ItemIdReusedRefusal` for an id that was sent before with media of another size.
        """
        mapped = []
        for index, (uuid, mm_hash) in enumerate(zip(uuids, mm_hashes, strict=True)):
            if uuid not in self._written:
                mapped.append(tenant_hash(mm_hash, self.salt))
                continue
            # vLLM hashes an id together with the options of the processor, if there are any.
            mapped.append(mm_hash if mm_hash == uuid else CLIENT_ID + mm_hash)
            self._check(uuid, modality, media_size(items, index), mapped[-1])
        if self._cache is not None:
            self._new_hashes.update(mm_hash for mm_hash in mapped if not self._cache.is_cached_item(mm_hash))
        return mapped

    def remember(self) -> None:
        """To be called when the media are processed: they are now what the ids stand for."""
        self._memory.add(self._seen)

    def undo(self) -> None:
        """To be called when the media cannot be processed: takes them out of the processor cache again.

        That cache answers for the engine's, which will never get them. vLLM fills it before it is done.
        """
        for mm_hash in self._new_hashes:
            self._cache.invalidate(mm_hash)

    def _tenant_ids(self, ids: Any) -> Any:
        if isinstance(ids, str):
            return self._tenant_id(ids)
        return [self._tenant_id(id_) for id_ in ids] if isinstance(ids, list | tuple) else ids

    def _tenant_id(self, id_: Any) -> Any:
        if not isinstance(id_, str):  # None asks for a hash of the content; anything else is for vLLM to refuse
            return id_
        tenant_id = tenant_client_id(id_, self.salt)
        self._written[tenant_id] = id_
        return tenant_id

    def _check(self, tenant_id: str, modality: str, size: tuple | None, mm_hash: str) -> None:
        if size is None:
            return
        key = IdKey(tenant_id, self._aside)
        before = self._seen.get(key) or self._memory.get(key)
        if before is not None and (before.modality, before.size) != (modality, size):
            raise ItemIdReusedRefusal(
                f"the id {self._written[tenant_id]!r} stands for media of another size: it was sent first for "
                f"{before.modality} of {_readable(before.size)}, and now for {modality} of {_readable(size)}. Give "
                "other media an id of its own, or leave the id away."
            )
        self._seen[key] = SeenMedia(modality, size, mm_hash)


_arrival: ContextVar[Arrival | None] = ContextVar("vllm_neuron_cache_arrival", default=None)


def mapping_hashes(get_mm_hashes: Any) -> Any:
    """Wraps vLLM's `ProcessorInputs.get_mm_hashes`, which runs before anything is looked up or kept under a hash."""

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        mm_hashes = get_mm_hashes(self, *args, **kwargs)
        arrival = _arrival.get()
        if arrival is None:
            return mm_hashes
        uuids = self.mm_uuid_items or {}
        return {
            modality: arrival.check_and_map(
                modality, self.mm_data_items[modality], list(uuids.get(modality, [None] * len(hashes))), hashes
            )
            for modality, hashes in mm_hashes.items()
        }

    return wrapper


def media_size(items: ModalityDataItems, index: int) -> tuple | None:
    """The size of one item as the client sent it; None where there is no data, or of a kind that is not known here."""
    media = items.get(index)
    if isinstance(items, ImageProcessorItems) and getattr(media, "ndim", 3) == 3 and hasattr(media, "size"):
        return tuple(items.get_image_size(index))  # the same for a picture and for its pixels in an array
    return _size(media)


def _size(media: Any) -> tuple | None:
    media = getattr(media, "media", media)  # in vLLM's wrapper that keeps the encoded bytes beside it
    if hasattr(media, "shape"):
        return tuple(media.shape)
    if isinstance(media, Mapping):
        sizes = [(name, _size(media[name])) for name in sorted(media, key=str)]
        return tuple(size for size in sizes if size[1] is not None) or None
    if isinstance(media, list | tuple):  # frames, or an array with its metadata
        sizes = [size for size in map(_size, media) if size is not None]
        return sizes[0] if len(sizes) == 1 else tuple(sizes) or None
    size = getattr(media, "size", None)
    return size if isinstance(size, tuple) else None


def _readable(size: tuple) -> str:
    return " x ".join(map(str, size)) if all(isinstance(part, int) for part in size) else str(size)

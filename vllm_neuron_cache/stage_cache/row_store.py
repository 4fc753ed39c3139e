"""Where rows are kept: what a row store is, and the one in host memory."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from vllm_neuron_cache.errors import OmniPrefixCacheUnmatchError
from vllm_neuron_cache.stage_cache.interface import PrefixCacheConfig
from vllm_neuron_cache.stage_cache.policy import KeyMemory, KeySpec, check_memory, plan_memory
from vllm_neuron_cache.stage_cache.values import map_tensors


class StagedRows(ABC):
    """The rows of one step for some keys, safe from whatever overwrites the tensors that they came from."""

    @abstractmethod
    def arrive(self) -> None:
        """Waits until the rows are in host memory, if they are on their way there."""

    @abstractmethod
    def write(self) -> None:
        """Puts the rows into the store, after `arrive`. Mutates the store."""

    @abstractmethod
    def rows(self, key: str) -> torch.Tensor:
        """Host tensor `[num_rows, *feature]`, which the caller copies from and does not keep. Waits as `arrive`."""


class RowStore(ABC):
    """Rows of every slot for every key. Keys are opened once and stay."""

    writes_at_stage = False
    """Whether `stage` itself writes into the store, so that nothing is left for `StagedRows.write`."""
    prefers_inline = True
    """Whether threads of the cache would have nothing to wait for beside the engine."""
    stages = True
    """Whether staging takes host memory."""
    limit_name = "host_bytes"
    """The limit of `PrefixCacheConfig` that holds for the store."""

    def __init__(self, config: PrefixCacheConfig) -> None:
        self.config = config
        self._specs: dict[str, KeySpec] = {}
        self._row_bytes: dict[str, int] = {}

    def row_bytes(self, keys: Iterable[str]) -> int:
        """Bytes of a row of each of `keys`, all together."""
        return sum([self._row_bytes[key] for key in keys])

    @property
    def specs(self) -> Mapping[str, KeySpec]:
        """Open keys."""
        return self._specs

    def memory(self, more: Iterable[KeySpec] = ()) -> tuple[KeyMemory, ...]:
        """Bytes of each open key, and of `more`."""
        specs = self._specs | {spec.name: spec for spec in more}
        return plan_memory(self.config, specs.values(), staged=self.stages)

    def open_keys(self, specs: Iterable[KeySpec]) -> None:
        """Allocates rows for keys that are not open. Raises `ConfigurationError`, with nothing allocated, if all keys
        together take more than the limit."""
        new = [spec for spec in specs if spec.name not in self._specs]
        check_memory(self.memory(new), getattr(self.config, self.limit_name), self.limit_name)
        for spec in new:
            # A key that turns up in a step is opened in the runner's inference mode, and need not be used in it.
            with torch.inference_mode(False):
                self._allocate(spec)
            self._specs[spec.name] = spec
            self._row_bytes[spec.name] = spec.row_bytes

    @abstractmethod
    def _allocate(self, spec: KeySpec) -> None: ...

    @abstractmethod
    def stage(self, slot: int, tensors: Mapping[str, torch.Tensor], num_rows: int, slots: np.ndarray) -> StagedRows:
        """Takes rows `[0, num_rows)` of each tensor, for `slots` (int64 `[num_rows]`), without waiting for the device.
        `slot` is a staging slot that nobody else has until the rows are written and used."""

    @abstractmethod
    def hold(self, tensors: Mapping[str, torch.Tensor], num_rows: int, slots: np.ndarray) -> StagedRows:
        """Takes rows like `stage`, and leaves them where they are until they are written."""

    def keep(self, tensors: Mapping[str, torch.Tensor], num_rows: int) -> StagedRows:
        """Takes rows that are for the step's own consumers and are never written."""
        kept = {key: tensor[:num_rows].clone() for key, tensor in tensors.items()}
        return HeldRows(kept, self.config.copy_chunk_bytes)

    def copy_to_host(self, value: Any) -> Any:
        """`value` with every tensor in it, in mappings, lists and tuples too, copied to host memory."""
        return map_tensors(value, lambda tensor: tensor.clone() if tensor.device.type == "cpu" else tensor.cpu())

    @abstractmethod
    def read(self, key: str, slots: np.ndarray, absent: np.ndarray | None, num_new: int) -> torch.Tensor:
        """A host tensor `[len(slots) + num_new, *feature]` of its own: the rows of `slots`, zeros where `absent` (bool
        `[len(slots)]`), and then room for new ones, which holds anything."""


class PrefixBlockPool:
    """Rows in host memory, `[num_blocks * block_size, *feature]` per key. One writer at a time; the ownership of blocks
    says whose rows they are."""

    def __init__(self, config: PrefixCacheConfig) -> None:
        self._config = config
        self._rows: dict[str, np.ndarray] = {}

    def open_key(self, spec: KeySpec) -> None:
        """Allocates and touches the rows of a key, so that no step pays for the pages."""
        self._rows[spec.name] = as_rows(torch.zeros(self._config.num_slots, *spec.shape, dtype=torch_dtype(spec)))

    def write(self, key: str, slots: np.ndarray, rows: np.ndarray) -> None:
        """`rows` as `as_rows` gives them, one for each of `slots`. Mutates the pool."""
        # One element per row: NumPy copies it as a whole, at nearly the speed of one large copy.
        self._rows[key][slots] = rows

    def read(self, key: str, slots: np.ndarray, out: np.ndarray) -> None:
        """Copies the rows of `slots` to `out`, of `as_rows` too."""
        np.take(self._rows[key], slots, out=out, mode="clip")


class StagingBufferPool:
    """Landing places of the rows of whole steps: `[depth, capacity, *feature]` per key, used again and again."""

    def __init__(self, config: PrefixCacheConfig) -> None:
        self._config = config
        self._slots: dict[str, Sequence[tuple[torch.Tensor, np.ndarray]]] = {}

    def open_key(self, spec: KeySpec, *, pinned: bool) -> None:
        """Allocates and touches the buffers of a key; `pinned` for copies that a device makes by itself."""
        shape = (self._config.staging_depth, self._config.staging_capacity_tokens, *spec.shape)
        buffer = torch.zeros(shape, dtype=torch_dtype(spec), pin_memory=pinned)
        self._slots[spec.name] = [(slot, as_rows(slot)) for slot in buffer]

    def views(self, slot: int, key: str, num_rows: int) -> tuple[torch.Tensor, np.ndarray]:
        """The first rows of a slot, as a tensor and as `as_rows`."""
        tensor, rows = self._slots[key][slot]
        return tensor[:num_rows], rows[:num_rows]


class HostRowStore(RowStore):
    """Rows in host memory. A step's rows are copied to a staging buffer in one transfer per key, and from there to
    their slots by whoever runs the write."""

    def __init__(self, config: PrefixCacheConfig) -> None:
        super().__init__(config)
        self._pool = PrefixBlockPool(config)
        self._staging = StagingBufferPool(config)
        self._pinned = torch.cuda.is_available()
        self.prefers_inline = not self._pinned

    def _allocate(self, spec: KeySpec) -> None:
        self._pool.open_key(spec)
        self._staging.open_key(spec, pinned=self._pinned)

    def stage(self, slot: int, tensors: Mapping[str, torch.Tensor], num_rows: int, slots: np.ndarray) -> StagedRows:
        check_capacity(num_rows, self.config)
        views = {}
        for key, tensor in tensors.items():
            views[key] = self._staging.views(slot, key, num_rows)
            views[key][0].copy_(tensor[:num_rows], non_blocking=tensor.is_cuda)
        return _StagedInHost(self._pool, views, slots, _fence(tensors.values()) if self._pinned else None)

    def hold(self, tensors: Mapping[str, torch.Tensor], num_rows: int, slots: np.ndarray) -> StagedRows:
        held = {key: tensor[:num_rows].clone() for key, tensor in tensors.items()}
        return HeldRows(held, self.config.copy_chunk_bytes, slots, self._pool)

    def read(self, key: str, slots: np.ndarray, absent: np.ndarray | None, num_new: int) -> torch.Tensor:
        spec = self._specs[key]
        out = empty_rows(spec, len(slots) + num_new)
        self._pool.read(key, slots, as_rows(out)[: len(slots)])
        clear_rows(out, absent)
        return out


class _StagedInHost(StagedRows):
    def __init__(
        self,
        pool: PrefixBlockPool,
        views: Mapping[str, tuple[torch.Tensor, np.ndarray]],
        slots: np.ndarray,
        fence: torch.cuda.Event | None,
    ) -> None:
        self._pool = pool
        self._views = views
        self._slots = slots
        self._fence = fence

    def arrive(self) -> None:
        if self._fence is not None:
            self._fence.synchronize()

    def write(self) -> None:
        for key, (_, rows) in self._views.items():
            self._pool.write(key, self._slots, rows)

    def rows(self, key: str) -> torch.Tensor:
        self.arrive()
        return self._views[key][0]


class HeldRows(StagedRows):
    """Rows that wait where they were made, as copies of their own."""

    def __init__(
        self,
        held: Mapping[str, torch.Tensor],
        chunk_bytes: int,
        slots: np.ndarray | None = None,
        pool: PrefixBlockPool | None = None,
    ) -> None:
        """Without `pool` there is nothing to write them to: they are for the step's own consumers only."""
        self._held = held
        self._chunk_bytes = chunk_bytes
        self._slots = slots
        self._pool = pool
        # Whoever copies them to the host may be on another stream than the engine, which made them.
        self._fence = _fence(held.values())
        self._arrived: dict[str, torch.Tensor] = {}

    def arrive(self) -> None:
        for key in self._held:
            self.rows(key)

    def write(self) -> None:
        for key in self._held:
            self._pool.write(key, self._slots, as_rows(self.rows(key)))

    def rows(self, key: str) -> torch.Tensor:
        rows = self._arrived.get(key)
        if rows is None:
            # Two threads may both come here; they copy the same rows.
            rows = self._arrived[key] = self._to_host(self._held[key])
        return rows

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "cpu":
            return tensor.contiguous()
        if self._fence is not None:
            self._fence.synchronize()
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
        rows = max(1, self._chunk_bytes * len(tensor) // max(1, tensor.nbytes))
        for first in range(0, len(tensor), rows):
            host[first : first + rows].copy_(tensor[first : first + rows])
        return host


def torch_dtype(spec: KeySpec) -> torch.dtype:
    return getattr(torch, spec.dtype)


def empty_rows(spec: KeySpec, num_rows: int) -> torch.Tensor:
    """A host tensor `[num_rows, *feature]`, which may be changed in inference mode and outside of it: the runner is in
    it, and whoever takes the outputs may not be."""
    with torch.inference_mode(False):
        return torch.empty(num_rows, *spec.shape, dtype=torch_dtype(spec))


def as_rows(tensor: torch.Tensor) -> np.ndarray:
    """The rows of a contiguous host tensor `[rows, *feature]`, each one opaque element; shares its memory."""
    num_bytes = tensor[0].nbytes if len(tensor) else tensor.new_zeros(1, *tensor.shape[1:]).nbytes
    flat = tensor.reshape(-1).view(torch.uint8).numpy()
    return flat.view(np.dtype((np.void, num_bytes)))


def clear_rows(out: torch.Tensor, absent: np.ndarray | None) -> None:
    """Zeros in the rows of `out` that `absent` (bool, of the first rows) names."""
    if absent is not None:
        out[: len(absent)][torch.from_numpy(absent)] = 0


def check_capacity(num_rows: int, config: PrefixCacheConfig) -> None:
    """Raises `OmniPrefixCacheUnmatchError` for a step that a staging slot does not hold."""
    if num_rows > config.staging_capacity_tokens:
        raise OmniPrefixCacheUnmatchError(
            f"the step has {num_rows} rows and a staging slot holds {config.staging_capacity_tokens}; set "
            "staging_capacity_tokens to the scheduler's max_num_batched_tokens"
        )


def _fence(tensors: Iterable[torch.Tensor]) -> torch.cuda.Event | None:
    """Whatever copies from a CUDA device were launched are over when this event is. None if there are none: every other
    device is waited for by the copy itself."""
    if not any(tensor.is_cuda for tensor in tensors):
        return None
    event = torch.cuda.Event()
    event.record()
    return event

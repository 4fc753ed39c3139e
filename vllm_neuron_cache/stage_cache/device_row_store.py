"""Rows on the device, in a pool that compiled graphs write and read."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from vllm_neuron_cache.graphs.bucketed import BucketedGraph
from vllm_neuron_cache.graphs.lanes import Lane
from vllm_neuron_cache.graphs.spec import BufferShape, doubling_buckets, split_by_buckets
from vllm_neuron_cache.graphs.stage_rows import stage_gather_spec, stage_write_spec
from vllm_neuron_cache.stage_cache.interface import PrefixCacheConfig
from vllm_neuron_cache.stage_cache.policy import KeyMemory, KeySpec
from vllm_neuron_cache.stage_cache.row_store import (
    HeldRows,
    RowStore,
    StagedRows,
    check_capacity,
    clear_rows,
    empty_rows,
)
from vllm_neuron_cache.stage_cache.row_store import torch_dtype as dtype_of

SMALLEST_BUCKET = 16
"""Rows of the smallest graphs."""


class _Pool(NamedTuple):
    rows: torch.Tensor
    """`[num_blocks + 1, block_size, width]` on the device; the last block is scratch."""
    write: BucketedGraph
    gather: BucketedGraph


class DeviceRowStore(RowStore):
    """Rows in device memory: `[num_blocks + 1, block_size, width]` per key, where the last block takes padding.

    A step's rows are scattered as they are saved, by a graph that mutates the pool in place. Launches run in the order
    they were made, so that nothing is staged and no thread has to put writes in order: rows that were saved before a
    gather are in it, and those saved after it are not. Rows reach the host when a consumer takes them.
    """

    writes_at_stage = True
    stages = False
    limit_name = "device_bytes"

    def __init__(
        self, config: PrefixCacheConfig, *, device: torch.device | str, lane: Lane, max_read_rows: int
    ) -> None:
        """`max_read_rows` is the most rows that one gather gives, in one transfer: the longest prompt's."""
        super().__init__(config)
        self._device = torch.device(device)
        self._lane = lane
        self._write_buckets = doubling_buckets(SMALLEST_BUCKET, config.staging_capacity_tokens)
        self._read_buckets = doubling_buckets(SMALLEST_BUCKET, max_read_rows)
        self._pools: dict[str, _Pool] = {}

    @property
    def graphs(self) -> tuple[BucketedGraph, ...]:
        """Of all open keys."""
        return tuple(graph for pool in self._pools.values() for graph in (pool.write, pool.gather))

    def pool(self, key: str) -> torch.Tensor:
        """The pool of an open key."""
        return self._pools[key].rows

    def memory(self, more: tuple[KeySpec, ...] = ()) -> tuple[KeyMemory, ...]:
        scratch = self.config.block_size
        specs = self._specs | {spec.name: spec for spec in more}
        return tuple(
            key._replace(pool_bytes=key.pool_bytes + scratch * specs[key.name].row_bytes)
            for key in super().memory(more)
        )

    def _allocate(self, spec: KeySpec) -> None:
        example = _as_words(torch.empty(1, *spec.shape, dtype=dtype_of(spec)))
        shape = BufferShape(self.config.num_blocks + 1, self.config.block_size, example.shape[1], example.dtype)
        rows = torch.zeros(shape[:3], dtype=shape.dtype, device=self._device)
        write = BucketedGraph(stage_write_spec(self._write_buckets, shape), self._lane)
        gather = BucketedGraph(stage_gather_spec(self._read_buckets, shape), self._lane)
        write.warm_up(lambda bucket: (rows, rows.new_zeros(bucket, shape.fat_dim), *self._places(bucket)))
        gather.warm_up(lambda bucket: (rows, *self._places(bucket)))
        self._pools[spec.name] = _Pool(rows, write, gather)

    def stage(self, slot: int, tensors: Mapping[str, torch.Tensor], num_rows: int, slots: np.ndarray) -> StagedRows:
        check_capacity(num_rows, self.config)
        # What the graph was given may be overwritten before a consumer takes it to the host. The copies have the
        # shapes of the tensors, which are those of the forward's graphs, so that they are no new shapes on the device.
        copies = {key: tensor.clone(memory_format=torch.contiguous_format) for key, tensor in tensors.items()}
        for key, tensor in copies.items():
            self._scatter(self._pools[key], _as_words(tensor), num_rows, slots)
        return _OnDevice({key: tensor[:num_rows] for key, tensor in copies.items()}, self.config.copy_chunk_bytes)

    def hold(self, tensors: Mapping[str, torch.Tensor], num_rows: int, slots: np.ndarray) -> StagedRows:
        # Nothing is won by waiting: rows do not leave the device either way.
        return self.stage(0, tensors, num_rows, slots)

    def read(self, key: str, slots: np.ndarray, absent: np.ndarray | None, num_new: int) -> torch.Tensor:
        spec, pool = self._specs[key], self._pools[key]
        out = empty_rows(spec, len(slots) + num_new)
        flat = _as_words(out)
        first = 0
        largest = self._read_buckets[-1]
        while first < len(slots):
            part = slots[first : first + largest]
            bucket = pool.gather.bucket_for(len(part))
            (rows,) = pool.gather.run(bucket, pool.rows, *self._places(bucket, part))
            flat[first : first + len(part)] = rows.cpu()[: len(part)]
            first += len(part)
        clear_rows(out, absent)
        return out

    def _scatter(self, pool: _Pool, rows: torch.Tensor, num_rows: int, slots: np.ndarray) -> None:
        first = 0
        for count in split_by_buckets(num_rows, self._write_buckets):
            bucket = max(count, self._write_buckets[0])
            part = rows[first : first + bucket]
            if len(part) < bucket:
                part = torch.cat([part, part.new_zeros(bucket - len(part), part.shape[1])])
            pool.write.run(bucket, pool.rows, part, *self._places(bucket, slots[first : first + count]))
            first += count

    def _places(self, bucket: int, slots: np.ndarray | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Block and row of each slot, int32 `[bucket]`; what is left over goes to the scratch block."""
        places = np.zeros((2, bucket), dtype=np.int32)
        num_slots = 0 if slots is None else len(slots)
        places[0, num_slots:] = self.config.num_blocks
        if num_slots:
            np.divmod(
                slots, self.config.block_size, out=(places[0, :num_slots], places[1, :num_slots]), casting="unsafe"
            )
        block_ids, block_rows = torch.from_numpy(places).to(self._device)
        return block_ids, block_rows


def _as_words(rows: torch.Tensor) -> torch.Tensor:
    """`rows` as `[rows, width]`, sharing their memory. Numbers of eight bytes become pairs of int32, as `graphs.check`
    has it: no device scatter takes more than 32 bits."""
    flat = rows.reshape(len(rows), -1)
    return flat.view(torch.int32) if flat.dtype.itemsize == 8 else flat


class _OnDevice(HeldRows):
    """Rows that are in the pool already; these are copies for the step's own consumers."""

    def arrive(self) -> None:
        pass

    def write(self) -> None:
        pass

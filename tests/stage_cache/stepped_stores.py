"""Row stores whose copies are made in two halves, with a point for another task before, between and after them."""

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from interleaving import Interleaving

from vllm_neuron_cache.graphs.lanes import EagerLane
from vllm_neuron_cache.graphs.lanes.base import Lowered
from vllm_neuron_cache.graphs.spec import GraphSpec
from vllm_neuron_cache.stage_cache import DeviceRowStore, HostRowStore, PrefixCacheConfig
from vllm_neuron_cache.stage_cache.policy import KeySpec
from vllm_neuron_cache.stage_cache.row_store import HeldRows, PrefixBlockPool, StagedRows, _StagedInHost


class InjectedError(RuntimeError):
    """A copy that was made to fail."""


class Failures:
    """Makes copies fail by a seeded chance."""

    def __init__(self, seed: int, chance: float, *, saves_too: bool) -> None:
        self._random = random.Random(seed)
        self._chance = chance
        self._saves_too = saves_too
        self.count = 0

    def may_come(self, label: str) -> None:
        if self._chance and self._random.random() < self._chance:
            self.count += 1
            raise InjectedError(label)

    def may_come_in_save(self, label: str) -> None:
        if self._saves_too:
            self.may_come(label)


class CopyEngine:
    """A device's copies into staging buffers: in their order, at any time after they were launched. A task of its own
    runs them, or the launch itself if `lags` is False."""

    def __init__(self, steps: Interleaving, *, lags: bool) -> None:
        self._steps = steps
        self._launched: list[tuple[Callable[[], None], _Arrival]] = []
        self._lags = lags
        self._is_closed = False
        if lags:
            steps.add("copy engine", self._run)

    def launch(self, copy: Callable[[], None]) -> "_Arrival":
        arrival = _Arrival(self._steps)
        if self._lags:
            self._launched.append((copy, arrival))
        else:
            copy()
            arrival.has_come = True
        return arrival

    def close(self) -> None:
        self._is_closed = True

    def _run(self) -> None:
        while True:
            self._steps.wait_until(lambda: self._launched or self._is_closed, "a copy")
            if not self._launched:
                return
            copy, arrival = self._launched.pop(0)
            copy()
            arrival.has_come = True


class _Arrival:
    """Stands for the event that is recorded behind a copy."""

    def __init__(self, steps: Interleaving) -> None:
        self._steps = steps
        self.has_come = False

    def synchronize(self) -> None:
        self._steps.wait_until(lambda: self.has_come, "rows on their way to the host")


class SteppedHostStore(HostRowStore):
    """Rows in host memory; deferred ones come in pieces, as from a device."""

    def __init__(self, config: PrefixCacheConfig, steps: Interleaving, failures: Failures, engine: CopyEngine) -> None:
        super().__init__(config)
        self._steps = steps
        self._engine = engine
        self._failures = failures
        self._pool = _PoolInHalves(config, steps, failures)

    def _allocate(self, spec: KeySpec) -> None:
        self._steps.copying("allocation")
        super()._allocate(spec)

    def stage(self, slot: int, tensors: Mapping[str, torch.Tensor], num_rows: int, slots: np.ndarray) -> StagedRows:
        self._steps.copying("staging")
        self._failures.may_come_in_save("staging")
        views = {key: self._staging.views(slot, key, num_rows) for key in tensors}
        # The device reads its own memory in the order of its work: before the next forward overwrites it.
        sources = {key: tensor[:num_rows].clone() for key, tensor in tensors.items()}

        def copy() -> None:
            for key, (buffer, _) in views.items():
                copy_in_halves(buffer, sources[key], self._steps, f"{key} to staging slot {slot}")

        staged = _StagedInSteps(self._pool, views, slots, self._engine.launch(copy))
        staged.steps, staged.failures = self._steps, self._failures
        return staged

    def hold(self, tensors: Mapping[str, torch.Tensor], num_rows: int, slots: np.ndarray) -> StagedRows:
        self._steps.copying("holding")
        self._failures.may_come_in_save("holding")
        held = {key: tensor[:num_rows].clone() for key, tensor in tensors.items()}
        rows = _HeldInSteps(held, self.config.copy_chunk_bytes, slots, self._pool)
        rows.steps, rows.failures = self._steps, self._failures
        return rows

    def read(self, key: str, slots: np.ndarray, absent: np.ndarray | None, num_new: int) -> torch.Tensor:
        self._failures.may_come(f"gather of {key}")
        return super().read(key, slots, absent, num_new)


class _PoolInHalves(PrefixBlockPool):
    def __init__(self, config: PrefixCacheConfig, steps: Interleaving, failures: Failures) -> None:
        super().__init__(config)
        self._steps = steps
        self._failures = failures

    def write(self, key: str, slots: np.ndarray, rows: np.ndarray) -> None:
        half = len(slots) // 2
        self._steps.copying(f"scatter of {key}")
        super().write(key, slots[:half], rows[:half])
        self._steps.copying(f"scatter of {key}, half done")
        self._failures.may_come(f"scatter of {key}")
        super().write(key, slots[half:], rows[half:])
        self._steps.copying(f"scatter of {key}, done")

    def read(self, key: str, slots: np.ndarray, out: np.ndarray) -> None:
        half = len(slots) // 2
        self._steps.copying(f"gather of {key}")
        super().read(key, slots[:half], out[:half])
        self._steps.copying(f"gather of {key}, half done")
        super().read(key, slots[half:], out[half:])
        self._steps.copying(f"gather of {key}, done")


class _StagedInSteps(_StagedInHost):
    steps: Interleaving
    failures: Failures

    def arrive(self) -> None:
        super().arrive()
        self.failures.may_come_in_save("arrival in a staging slot")

    def rows(self, key: str) -> torch.Tensor:
        rows = super().rows(key)
        self.steps.copying(f"{key} out of a staging slot")
        return rows


class _HeldInSteps(HeldRows):
    steps: Interleaving
    failures: Failures

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        host = torch.zeros_like(tensor)
        copy_in_halves(host, tensor, self.steps, "held rows to the host")
        self.failures.may_come_in_save("held rows to the host")
        return host


def copy_in_halves(out: torch.Tensor, rows: torch.Tensor, steps: Interleaving, label: str) -> None:
    half = len(rows) // 2
    steps.copying(label)
    out[:half] = rows[:half]
    steps.copying(f"{label}, half done")
    out[half:] = rows[half:]
    steps.copying(f"{label}, done")


class SteppedLane(EagerLane):
    """Graphs of the device store. One lane serves all runs, each with `use`, since it traces a graph only once."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: Interleaving | None = None
        self.failures: Failures | None = None
        self._calls: dict[str, Callable[..., Any]] = {}

    def use(self, steps: Interleaving | None, failures: Failures | None) -> None:
        self.steps, self.failures = steps, failures

    def lower(self, spec: GraphSpec, bucket: int, example_args: tuple[Any, ...]) -> Callable[..., Any]:
        # Without a compiler all buckets and all pools have the same.
        if spec.name not in self._calls:
            self._calls[spec.name] = super().lower(spec, bucket, example_args)
        return self._calls[spec.name]

    def _lower(self, spec: GraphSpec, bucket: int, example_args: tuple[Any, ...]) -> Lowered:
        lowered = super()._lower(spec, bucket, example_args)
        return lowered._replace(call=self._in_halves(spec.name, lowered.call))

    def _in_halves(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(pool: torch.Tensor, *rows: torch.Tensor) -> Any:
            steps = self.steps
            if steps is None:  # warm-up
                return call(pool, *rows)
            half = len(rows[0]) // 2
            steps.copying(name)
            first = call(pool, *(part[:half] for part in rows))
            steps.copying(f"{name}, half done")
            self.failures.may_come(name)
            second = call(pool, *(part[half:] for part in rows))
            steps.copying(f"{name}, done")
            return first and tuple(torch.cat(parts) for parts in zip(first, second))

        return run


def device_store(config: PrefixCacheConfig, lane: SteppedLane, max_read_rows: int) -> DeviceRowStore:
    return DeviceRowStore(config, device="cpu", lane=lane, max_read_rows=max_read_rows)

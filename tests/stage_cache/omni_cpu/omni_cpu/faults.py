"""A worker whose stage cache serves the first hit, reads zeros for the second, and cannot read the third."""

from typing import Any

from omni_cpu.worker import ArWorker
from vllm_neuron_cache.stage_cache import HostRowStore


class FaultyStore(HostRowStore):
    num_reads = 0

    def read(self, *args: Any) -> Any:
        FaultyStore.num_reads += 1
        if FaultyStore.num_reads == 3:
            raise RuntimeError("memory is gone")
        rows = super().read(*args)
        return rows.zero_() if FaultyStore.num_reads == 2 else rows


class FaultyArWorker(ArWorker):
    def init_device(self) -> None:
        from vllm_neuron_cache.integrations.vllm_omni import runner

        runner.HostRowStore = FaultyStore
        super().init_device()

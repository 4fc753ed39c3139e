"""vLLM's CPU worker with the encoder cache in its model runner."""

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_neuron_cache.encoder_cache.report import WorkerEntry, WorkerEpochs
from vllm_neuron_cache.errors import ConfigurationError
from vllm_neuron_cache.integrations.vllm.runner import BlockRunnerMixin


class BlockWorkerMixin:
    """Over a V1 worker: gives its runner the mixin, and the cache its memory and its warm-up."""

    def init_device(self) -> None:
        super().init_device()
        if getattr(self, "use_v2_model_runner", False):
            raise ConfigurationError(
                "the encoder cache works with vLLM's V1 model runner, and this engine chose V2. "
                "Set VLLM_USE_V2_MODEL_RUNNER=0."
            )
        base = type(self.model_runner)
        self.model_runner.__class__ = type(f"Block{base.__name__}", (BlockRunnerMixin, base), {})

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        self.model_runner.init_block_encoder_cache()

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        self.model_runner.warm_up_block_encoder_cache()
        return times

    def sleep(self, *args: Any, **kwargs: Any) -> None:
        # A deep sleep gives device memory away; which part of it comes back as it was differs by platform.
        self.model_runner.note_rows_lost()
        super().sleep(*args, **kwargs)

    def update_weights(self, *args: Any, **kwargs: Any) -> Any:
        # Weights may be copied in place, without the model's own method for loading them.
        self.model_runner.note_weights_changed()
        return super().update_weights(*args, **kwargs)

    def encoder_cache_epochs(self) -> WorkerEpochs:
        """For the engine core: how often this rank has dropped rows, and changed its weights."""
        return self.model_runner.encoder_cache_epochs

    def encoder_cache_stats(self) -> dict[str, int]:
        """For `collective_rpc("encoder_cache_stats")`: what this rank did so far."""
        return self.model_runner.encoder_runtime.stats()._asdict()

    def check_encoder_cache_integrity(self) -> list[WorkerEntry]:
        """For `collective_rpc`: raises `IntegrityError` if this rank's table is inconsistent; returns what is in it.

        Called through the engine, it also compares this with the scheduler's pool.
        """
        self.model_runner.encoder_runtime.check_integrity()
        table = self.model_runner.encoder_runtime.blocks.table
        return [WorkerEntry(entry.key, entry.generation, entry.block_ids, entry.written) for entry in table.entries()]


class BlockCPUWorker(BlockWorkerMixin, CPUWorker):
    """What `--worker-cls` names on CPU."""

"""vLLM's CPU worker with vLLM-Omni's model runners."""

from typing import Any

from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner
from vllm_omni.worker.gpu_generation_model_runner import GPUGenerationModelRunner
from vllm_omni.worker.mixins import OmniWorkerMixin


class ArRunner(GPUARModelRunner, CPUModelRunner):
    def load_model(self, *args: Any, **kwargs: Any) -> None:
        GPUARModelRunner.load_model(self, *args, **kwargs)
        # The model sets it in the forward of the profiling run, which the CPU worker leaves out.
        if not hasattr(self.model, "voice_type"):
            self.model.voice_type = "Chelsie"


class GenerationRunner(GPUGenerationModelRunner, CPUModelRunner):
    pass


class _Worker(OmniWorkerMixin, CPUWorker):
    def init_device(self) -> None:
        super().init_device()
        self.use_v2_model_runner = False
        self.model_runner = self.model_runner_cls(self.vllm_config, self.device)


class ArWorker(_Worker):
    model_runner_cls = ArRunner


class GenerationWorker(_Worker):
    model_runner_cls = GenerationRunner

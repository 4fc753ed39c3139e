"""What scheduler and workers send each other beside vLLM's own objects."""

from typing import Any, NamedTuple

from vllm.config.ec_manager_config import EncoderCacheManagerMetadata
from vllm.multimodal.inputs import MultiModalFeatureSpec

from vllm_neuron_cache.encoder_cache.report import StepReport, WorkerEpochs
from vllm_neuron_cache.encoder_cache.steps import EncoderCacheStep


class RestoredInput(NamedTuple):
    """An item whose data the worker did not get with the request, and needs now."""

    request_id: str
    input_id: int
    feature: MultiModalFeatureSpec


class _Metadata(NamedTuple):
    step: EncoderCacheStep
    worker_epochs: WorkerEpochs
    """What the scheduler knew of the workers when it made the step."""
    restored: tuple["RestoredInput", ...] = ()


class BlockCacheMetadata(_Metadata, EncoderCacheManagerMetadata):
    """Travels in `SchedulerOutput.ec_manager_metadata`, once per scheduling pass."""


_REPORT = "encoder_cache_report"


def attach_report(model_runner_output: Any, report: StepReport) -> None:
    """Sends a report along with a step's `ModelRunnerOutput`, which has no field for it. Mutates the output."""
    setattr(model_runner_output, _REPORT, report)


def report_of(model_runner_output: Any) -> StepReport | None:
    return getattr(model_runner_output, _REPORT, None)

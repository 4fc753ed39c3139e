"""The thinker as one stage of vLLM-Omni in this process, and what its requests are handed."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from vllm_neuron_cache.demo.omni_checkpoint import IMAGE_PLACEHOLDER
from vllm_neuron_cache.demo.recipe import END_OF_TURN, START_OF_TURN

BLOCK_SIZE = 32
FEW_BLOCKS = 15
"""One of them is vLLM's null block: fewer than two of the long requests need in the end."""
MANY_BLOCKS = 128
BLOCK_BYTES = 65536

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # So that an id can be used again.
    "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1",
}

_PLATFORM = str(Path(__file__).parent / "omni_cpu")


def use_cpu_platform() -> None:
    """vLLM-Omni finds the platform of the tests, here and in processes that are started from here."""
    if _PLATFORM not in sys.path:
        sys.path.insert(0, _PLATFORM)


class Prompt(NamedTuple):
    """About 75 tokens and one for each character of the text, which come after the picture."""

    picture: int | None
    text: str

    def for_engine(self) -> dict[str, Any]:
        picture = "" if self.picture is None else IMAGE_PLACEHOLDER
        text = f"{START_OF_TURN}user\n{picture}{self.text}{END_OF_TURN}\n{START_OF_TURN}assistant\n"
        media = {} if self.picture is None else {"multi_modal_data": {"image": _picture(self.picture)}}
        return {"prompt": text, **media}


def _picture(seed: int) -> Any:
    from PIL import Image

    y, x = np.mgrid[0:224, 0:280]
    return Image.fromarray(np.stack([(x * seed) % 256, (y * 3) % 256, (x + y * seed) % 256], -1).astype(np.uint8))


class Handed(NamedTuple):
    """What one request got, over all its steps."""

    tokens: tuple[int, ...]
    payloads: tuple[dict[str, Any], ...]
    """Of each step."""
    num_cached: int
    """Prompt tokens that were a hit when it was scheduled first."""
    first_step: int
    error: str | None = None

    def rows(self, key: str) -> Any:
        """`[rows, *feature]`, of all steps that had the key."""
        import torch

        return torch.cat([payload[key] for payload in self.payloads if key in payload])


class Stage:
    """The thinker alone, as a stage that hands on its hidden states. `close` it."""

    def __init__(
        self,
        checkpoint: Path,
        *,
        prefix_caching: bool,
        stage_cache: dict | None = None,
        num_blocks: int = FEW_BLOCKS,
        num_ranks: int = 1,
    ) -> None:
        use_cpu_platform()
        from vllm.v1.engine.llm_engine import LLMEngine
        from vllm_omni.engine.arg_utils import OmniEngineArgs

        with mock.patch.dict(os.environ, ENVIRONMENT):
            arguments = OmniEngineArgs(
                model=str(checkpoint),
                stage_id=0,
                model_stage="thinker",
                model_arch="Qwen2_5OmniForConditionalGeneration",
                hf_config_name="thinker_config",
                engine_output_type="latent",
                worker_cls="omni_cpu.worker.ArWorker",
                scheduler_cls="vllm_omni.core.sched.omni_ar_scheduler.OmniARScheduler",
                tensor_parallel_size=num_ranks,
                distributed_executor_backend="uni" if num_ranks == 1 else "mp",
                async_scheduling=False,
                enforce_eager=True,
                dtype="float32",
                block_size=BLOCK_SIZE,
                max_model_len=384,
                max_num_batched_tokens=256,  # so that the prompts of two long requests come in chunks
                max_num_seqs=4,
                kv_cache_memory_bytes=num_blocks * BLOCK_BYTES // num_ranks,
                enable_prefix_caching=prefix_caching,
                mm_processor_cache_gb=0,
                additional_config={} if stage_cache is None else {"vllm_neuron_cache": {"stage_cache": stage_cache}},
            )
            self.engine = LLMEngine.from_vllm_config(arguments.create_engine_config(), disable_log_stats=True)
        self._payloads: dict[str, list[dict[str, Any]]] = {}
        self._first_steps: dict[str, int] = {}
        self._num_steps = 0
        self._record()

    @property
    def core(self) -> Any:
        return self.engine.engine_core.engine_core

    @property
    def runner(self) -> Any:
        return self.core.model_executor.driver_worker.worker.model_runner

    @property
    def cache(self) -> Any:
        return self.runner.omni_prefix_cache

    def add(self, req_id: str, prompt: Prompt, max_tokens: int) -> None:
        from vllm import SamplingParams

        self._payloads[req_id] = []
        self._first_steps.pop(req_id, None)
        with mock.patch.dict(os.environ, ENVIRONMENT):
            sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
            self.engine.add_request(req_id, prompt.for_engine(), sampling)

    def step(self) -> dict[str, Handed]:
        """One step; what the requests that ended in it were handed in all."""
        ended = {}
        self._num_steps += 1
        for output in self.engine.step():
            if output.finished:
                completion = output.outputs[0]
                ended[output.request_id] = Handed(
                    tuple(completion.token_ids),
                    tuple(self._payloads.pop(output.request_id)),
                    output.num_cached_tokens or 0,
                    self._first_steps.pop(output.request_id),
                    completion.stop_reason if completion.finish_reason == "error" else None,
                )
        return ended

    def abort(self, req_id: str) -> list[dict[str, Any]]:
        """What it had been handed until then."""
        self.engine.abort_request([req_id])
        return self._payloads.pop(req_id)

    def serve(self, prompts: Sequence[Prompt], max_tokens: int = 4) -> list[Handed]:
        """Of each request, all submitted at once; "0" is the id of the first."""
        for index, prompt in enumerate(prompts):
            self.add(str(index), prompt, max_tokens)
        ended: dict[str, Handed] = {}
        while self.engine.has_unfinished_requests():
            ended |= self.step()
        return [ended[str(index)] for index in range(len(prompts))]

    def reset(self) -> None:
        """No prefix is known any longer."""
        assert self.core.scheduler.reset_prefix_cache()

    def close(self) -> None:
        self.engine.engine_core.shutdown()

    def _record(self) -> None:
        update = self.core.scheduler.update_from_output

        def recording(scheduler_output: Any, model_runner_output: Any) -> Any:
            payloads = model_runner_output.inter_stage_outputs or ()
            for req_id, payload in zip(model_runner_output.req_ids, payloads):
                self._payloads[req_id].append(payload)
                self._first_steps.setdefault(req_id, self._num_steps)
            return update(scheduler_output, model_runner_output)

        self.core.scheduler.update_from_output = recording


@contextmanager
def multimodal_outputs(make: Callable[[Any], dict[str, Any]]) -> Iterator[None]:
    """Every stage puts out `make(hidden states)` beside its hidden states. The thinker of the tests has none."""
    from vllm_omni.worker.gpu_model_runner import OmniGPUModelRunner

    extract = OmniGPUModelRunner.extract_multimodal_outputs

    def extracting(self: Any, output: Any) -> tuple[Any, dict[str, Any]]:
        hidden, _ = extract(self, output)
        return hidden, make(hidden)

    with mock.patch.object(OmniGPUModelRunner, "extract_multimodal_outputs", extracting):
        yield

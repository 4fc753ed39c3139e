"""An offline engine with the probes that demo, benchmarks and tests need. Works with and without the cache."""

import gc
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from vllm_neuron_cache.config import ENCODER_NAMESPACE, OWN_NAMESPACE

# Read by vLLM when it is imported and when an engine starts; the caller's own values stay.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

from vllm import LLM, SamplingParams, envs


class Completion(NamedTuple):
    """What came back for one request."""

    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    ttft_ms: float
    """From the request's arrival, before its media are processed, to its first token."""


class OfflineEngine:
    """A vLLM `LLM` with the settings of the demo. `close` it; two can live side by side."""

    def __init__(
        self,
        model: Path | str,
        *,
        cache: Mapping[str, Any] | None,
        encoder: Mapping[str, Any] | None = None,
        in_process: bool = True,
        **args: Any,
    ) -> None:
        """Starts the engine.

        Args:
            model: directory of the checkpoint.
            cache: what stands under `vllm_neuron_cache`; None starts stock vLLM.
            encoder: what stands under `encoder_neuron_config`.
            in_process: keep scheduler and worker in this process, where the properties below can reach them.
            args: for `LLM`, over the settings of the demo.
        """
        additional_config = {} if cache is None else {OWN_NAMESPACE: dict(cache)}
        if encoder is not None:
            additional_config[ENCODER_NAMESPACE] = dict(encoder)
        settings = {
            "enforce_eager": True,
            "dtype": "float32",
            "seed": 0,
            "max_num_seqs": 8,
            "kv_cache_memory_bytes": 256 << 20,
            "limit_mm_per_prompt": {"image": 4, "video": 1},
            "disable_log_stats": False,
            "use_tqdm_on_load": False,
        }
        # What an engine that is still open here read of the environment is not what this one is to find.
        envs.disable_envs_cache()
        # vLLM has no argument for this. A forked engine would inherit this process's thread pools without the threads.
        with _environment(
            VLLM_ENABLE_V1_MULTIPROCESSING="0" if in_process else "1", VLLM_WORKER_MULTIPROC_METHOD="spawn"
        ):
            self.llm = LLM(model=str(model), **(settings | args), additional_config=additional_config)
        self.encoder_runs = 0
        """Items that the encoder ran on, counted at the model, whatever cache is in use. In-process only."""
        if in_process:
            self._count_encoder_runs()

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def manager(self) -> Any:
        """The encoder-cache manager: ours with the cache, vLLM's without."""
        return self.scheduler.encoder_cache_manager

    @property
    def worker(self) -> Any:
        return self.llm.llm_engine.model_executor.driver_worker.worker

    @property
    def runner(self) -> Any:
        return self.worker.model_runner

    def generate(self, prompts: Sequence[Mapping[str, Any]], *, max_tokens: int) -> list[Completion]:
        """Greedy tokens of `prompts`, all submitted at once."""
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        outputs = self.llm.generate([dict(prompt) for prompt in prompts], sampling, use_tqdm=False)
        return [
            Completion(
                tuple(output.outputs[0].token_ids),
                tuple(output.prompt_token_ids),
                output.metrics.first_token_latency * 1e3,
            )
            for output in outputs
        ]

    def metric(self, name: str) -> float:
        """The value of one of vLLM's own counters, summed over its labels."""
        return sum(metric.value for metric in self.llm.get_metrics() if metric.name == name)

    def close(self) -> None:
        """Ends the engine and gives its memory back."""
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()

    def _count_encoder_runs(self) -> None:
        embed = self.runner.model.embed_multimodal

        def counting(**kwargs: Any) -> Any:
            outputs = embed(**kwargs)
            self.encoder_runs += len(outputs)
            return outputs

        self.runner.model.embed_multimodal = counting
        if hasattr(self.runner, "encode_compiled"):
            encode = self.runner.encode_compiled

            def counting_compiled(items: Sequence[Any]) -> None:
                encode(items)
                self.encoder_runs += len(items)

            self.runner.encode_compiled = counting_compiled


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def placeholder_tokens(checkpoint: Path) -> tuple[int, int]:
    """Image and video placeholder token ids of a checkpoint."""
    config = json.loads((checkpoint / "config.json").read_text())
    return config["image_token_id"], config["video_token_id"]

"""A hit step of the real engine with the cache on the stand-in device. Prints what it did as JSON.

A process of its own, because the device changes the whole process: `python neuron_step.py CHECKPOINT`.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import neuron_device as neuron
import torch
from engines import small_media, start

from vllm_neuron_cache.demo.requests import MediaRequest, engine_prompt
from vllm_neuron_cache.graphs.lanes import EagerLane
from vllm_neuron_cache.graphs.lanes.base import Lane
from vllm_neuron_cache.runtime import EncoderCacheRuntime, MergeTargets

TRAFFIC = neuron.TRAFFIC
SIZES = {"lane": "eager", "encoder_cache_block_size": 64, "encoder_cache_num_blocks_exact": 33}
REQUESTS = {
    "one": MediaRequest(images=("chelsea",)),
    "several": MediaRequest(images=("coffee", "china", "chelsea"), after="Which?"),
    "a chunk that ends within": MediaRequest(before="The large one. ", images=("hubble",)),
}


class DeviceEngine:
    """An in-process engine whose cache and merge targets are on the device; the model stays on the CPU.

    From the scheduler's output to the model's forward everything is the real runner's. Before the forward, traffic is
    read off, and the merged rows go to the CPU so that the tokens can be compared.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.runner = engine.runner
        self.steps: list[dict[str, Any]] = []
        self._forward = self.runner._model_forward
        self._execute = self.runner.execute_model
        self._embed = self.runner.model.embed_input_ids
        runtime = self.runner.encoder_runtime
        self._blocks = runtime.blocks
        levels = len(self.runner.model.deepstack_input_embeds)
        shape = self.runner.max_num_tokens + 1, self.runner.inputs_embeds_size
        with torch.inference_mode():
            zeros = torch.zeros(shape, dtype=self.runner.dtype)
            self.targets = MergeTargets(neuron.on_device(zeros), tuple(neuron.on_device(zeros) for _ in range(levels)))

    @torch.inference_mode()
    def move(self, lane: Lane) -> EncoderCacheRuntime:
        """Puts the cache as it is onto the device, with graphs of that lane."""
        runner, device = self.runner, torch.device("neuron:0")
        runtime = EncoderCacheRuntime(
            self._blocks.geometry,
            fat_dim=self._blocks.fat_dim,
            dtype=self._blocks.buffer.dtype,
            device=device,
            targets=self.targets,
            lane=lane,
        )
        runtime.warm_up()
        runtime.blocks.buffer.copy_(self._blocks.buffer)
        runtime.blocks.table = self._blocks.table
        runner._encoder_runtime = runtime
        runner.inputs_embeds.gpu = self.targets.hidden[:-1]
        runner._model_forward = self._forward_on_cpu
        runner.execute_model = self._counted
        runner.model.embed_input_ids = self._embed_on_device
        return runtime

    def tokens(self, prompt: Any) -> tuple[int, ...]:
        self.engine.llm.reset_prefix_cache()
        self.steps = []
        return self.engine.generate([prompt], max_tokens=4)[0].token_ids

    def _counted(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        TRAFFIC.clear()
        with TRAFFIC.no_host_reads():
            return self._execute(scheduler_output, *args, **kwargs)

    def _embed_on_device(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        # The table of text embeddings is on the device there.
        return neuron.on_device(self._embed(*args, **kwargs))

    def _forward_on_cpu(self, *args: Any, inputs_embeds: torch.Tensor, **kwargs: Any) -> Any:
        TRAFFIC.host_reads_forbidden = False
        self.steps.append(
            {
                "to_host": list(TRAFFIC.to_host),
                "to_device": list(TRAFFIC.to_device),
                "eager": list(TRAFFIC.eager),
                "launches": list(TRAFFIC.launches),
            }
        )
        model = self.runner.model
        model.deepstack_input_embeds = [level.raw[:-1].clone() for level in self.targets.deepstack]
        output = self._forward(*args, inputs_embeds=inputs_embeds.raw, **kwargs)
        for level in self.targets.deepstack:
            level.raw.zero_()
        return output


@contextmanager
def instead(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def error_of(action: Callable[[], Any]) -> str | None:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def reads_the_host_cannot_make() -> dict[str, str | None]:
    tensor = neuron.on_device(torch.ones(3, dtype=torch.int32))
    reads: dict[str, Callable[[], Any]] = {
        "item": lambda: tensor[0].item(),
        "tolist": lambda: tensor.tolist(),
        "cpu": lambda: tensor.cpu(),
        "to": lambda: tensor.to("cpu"),
        "numpy": lambda: tensor.numpy(),
        "bool": lambda: bool(tensor[0]),
        "int": lambda: int(tensor[0]),
        "copy_": lambda: torch.zeros(3, dtype=torch.int32).copy_(tensor),
        "equal": lambda: torch.equal(tensor, tensor),
        "nonzero": lambda: tensor[tensor > 0].cpu(),
    }
    with TRAFFIC.no_host_reads():
        return {name: error_of(read) for name, read in reads.items()}


def main(checkpoint: Path) -> dict[str, Any]:
    engine = start(checkpoint, SIZES, max_num_batched_tokens=512)
    media = small_media()
    prompts = {name: engine_prompt(request, media) for name, request in REQUESTS.items()}
    expected = {name: engine.generate([prompt], max_tokens=4)[0].token_ids for name, prompt in prompts.items()}
    encoder_runs = engine.encoder_runs
    neuron.register()
    device = DeviceEngine(engine)
    runtime = device.move(neuron.StandInLane())
    result: dict[str, Any] = {"requests": {}, "controls": {}}
    for name, prompt in prompts.items():
        tokens = device.tokens(prompt)
        result["requests"][name] = {"steps": device.steps, "tokens": tokens, "expected": expected[name]}
    result["encoder_runs"] = engine.encoder_runs - encoder_runs
    result["recompiles"] = runtime.stats().recompiles_after_warmup
    result["refused_reads"] = reads_the_host_cannot_make()

    # The same engine, with one thing wrong in each.
    controls = result["controls"]
    prompt = prompts["one"]

    def sending_rows(merge: Any) -> Any:
        def wrapper(plan: Any) -> None:
            device.targets.hidden[:1].copy_(torch.zeros(1, device.targets.hidden.shape[1]))
            merge(plan)

        return wrapper

    with instead(runtime, "merge", sending_rows):
        device.tokens(prompt)
    controls["rows sent"] = device.steps[0]
    device.move(EagerLane())
    device.tokens(prompt)
    controls["eager lane"] = device.steps[0]

    def reading(merge: Any) -> Any:
        def wrapper(plan: Any) -> None:
            merge(plan)
            device.targets.hidden[0, 0].item()

        return wrapper

    runtime = device.move(neuron.StandInLane())
    with instead(runtime, "merge", reading):  # the last: the engine does not outlive it
        controls["read"] = error_of(lambda: device.tokens(prompt))
    return result


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))

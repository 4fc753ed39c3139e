"""The acceptance run on the stand-in device, which is no Trainium: that its code is right where the cache is elsewhere.

A process of its own, because the device changes the whole process: `python acceptance_on_stand_in.py CHECKPOINT`.
Prints the checks as JSON.
"""

import json
import sys
from pathlib import Path
from typing import Any

import neuron_device as neuron

from vllm_neuron_cache.acceptance.device_checks import check_device
from vllm_neuron_cache.acceptance.tokens import serve_and_compare
from vllm_neuron_cache.config import NeuronCacheConfig
from vllm_neuron_cache.demo.comparison import load_media, start_pair
from vllm_neuron_cache.graphs.deployment import plan_deployment
from vllm_neuron_cache.integrations.vllm.device_cache import move_cache
from vllm_neuron_cache.planner.model import load_model_shape
from vllm_neuron_cache.runtime import EncoderCacheRuntime

neuron.NeuronTensor.data_ptr = lambda tensor: tensor.raw.data_ptr()


def reading(merge: Any) -> Any:
    def wrapper(runtime: EncoderCacheRuntime, plan: Any) -> None:
        merge(runtime, plan)
        runtime.targets.hidden[:4].cpu()

    return wrapper


def main(checkpoint: Path) -> dict[str, Any]:
    media = load_media()
    engines = start_pair(checkpoint, {"lane": "eager"}, media, lambda text: None)
    device = neuron.register()  # after vLLM is up, which asks of a device more than the stand-in has
    config = NeuronCacheConfig.from_additional_config({"vllm_neuron_cache": {"encoder_cache_block_size": 64}})
    deployment = plan_deployment(load_model_shape(checkpoint), config, max_num_batched_tokens=8192, device="neuron")
    checks = check_device(deployment, neuron.StandInLane(), device, rounds=3, limit_ms=1e6)
    move_cache(engines[1], device, neuron.StandInLane())
    checks.append(serve_and_compare(*engines, media, checkpoint))
    merge = EncoderCacheRuntime.merge
    EncoderCacheRuntime.merge = reading(merge)
    planted = check_device(deployment, neuron.StandInLane(), device, rounds=3, limit_ms=1e6)
    return {
        "checks": {check.name: check._asdict() for check in checks},
        "planted": {check.name: check._asdict() for check in planted},
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))), flush=True)

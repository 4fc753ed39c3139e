"""Thinker and talker as two stages in processes of their own: omni_pipeline.py CHECKPOINT RESULT.json

Sends one prompt again and again, and writes what each stage answered. The thinker's cache goes wrong on the way, as
omni_cpu.faults says.
"""

import asyncio
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

from omni_stage import BLOCK_SIZE, Prompt, use_cpu_platform

NUM_TIMES = 5
PROMPT = Prompt(1, "describe what is seen in this picture in some detail " * 3)

VOCABULARY = 151936
"""The talker looks up the thinker's embeddings of tokens by numbers that are written into its code."""


def build_checkpoint(thinker: Path, directory: Path) -> Path:
    """The thinker of `thinker`, with a larger vocabulary, and a talker of 1.7 million parameters."""
    import shutil

    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, Qwen2_5OmniTalkerForConditionalGeneration
    from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniTalkerConfig

    shutil.copytree(thinker, directory, dirs_exist_ok=True)
    config = AutoConfig.from_pretrained(directory)
    thinker_config = config.thinker_config
    talker = config.talker_config.to_dict() | {
        "embedding_size": thinker_config.text_config.hidden_size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_window_layers": 2,
        "vocab_size": 8448,
        "tts_text_start_token_id": 151860,
        "tts_text_end_token_id": 151861,
        "tts_text_pad_token_id": 151859,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [6, 5, 5]},
    }
    for name in ("audio_token_index", "image_token_index", "video_token_index", "vision_start_token_id",
                 "vision_end_token_id", "audio_start_token_id", "audio_end_token_id"):  # fmt: skip
        talker[name] = getattr(thinker_config, name)
    for name in ("layer_types", "model_type", "transformers_version", "architectures"):
        talker.pop(name, None)
    config.talker_config = Qwen2_5OmniTalkerConfig(**talker)
    config.enable_audio_output = True
    config.architectures = ["Qwen2_5OmniForConditionalGeneration"]
    config.save_pretrained(directory)
    written = json.loads((directory / "config.json").read_text())
    written["thinker_config"]["text_config"]["vocab_size"] = VOCABULARY
    (directory / "config.json").write_text(json.dumps(written))

    model = Qwen2_5OmniTalkerForConditionalGeneration(config.talker_config)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                scale = parameter[0].numel() ** 0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / scale)
    weights = load_file(directory / "model.safetensors")
    for name in ("thinker.model.embed_tokens.weight", "thinker.lm_head.weight"):
        small = weights[name]
        weights[name] = torch.zeros(VOCABULARY, small.shape[1])
        weights[name][: len(small)] = small
    weights |= {f"talker.{name}": value.contiguous().clone() for name, value in model.state_dict().items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def deployment() -> dict[str, Any]:
    """What stands in the deploy file. The key is the first stage's alone."""
    both = {
        "max_num_batched_tokens": 512,
        "max_num_seqs": 4,
        "max_model_len": 2048,
        "block_size": BLOCK_SIZE,
        "enforce_eager": True,
        "dtype": "float32",
        "distributed_executor_backend": "uni",
        "mm_processor_cache_gb": 0,
        "kv_cache_memory_bytes": 16 << 20,
        "devices": "0",
    }
    thinker = {
        "stage_id": 0,
        "enable_prefix_caching": True,
        "additional_config": {"vllm_neuron_cache": {"stage_cache": {"store": "host", "host_bytes": 64 << 20}}},
        "worker_cls": "omni_cpu.faults.FaultyArWorker",
    }
    talker = {"stage_id": 1, "enable_prefix_caching": False}
    return {
        "pipeline": "thinker_and_talker",
        "async_chunk": False,
        "stages": [both | thinker, both | talker],
    }


def _register_pipeline() -> None:
    """The first two stages of Qwen2.5-Omni's pipeline; there is no third, which would turn codes to sound."""
    from vllm_omni.config import pipeline_registry

    whole = pipeline_registry.OMNI_PIPELINES["qwen2_5_omni"]
    thinker, talker = whole.stages[:2]
    talker = dataclasses.replace(
        talker, final_output=True, final_output_type="text", custom_process_next_stage_input_func=None
    )
    pipeline_registry.register_pipeline(
        dataclasses.replace(
            whole, model_type="thinker_and_talker", default_deploy_config_name=None, stages=(thinker, talker)
        )
    )


async def ask_again_and_again(checkpoint: Path, result: Path) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm_omni.entrypoints.async_omni import AsyncOmni

    deploy_file = result.with_name("deploy.yaml")
    deploy_file.write_text(json.dumps(deployment()))
    # As the server has it. The offline `Omni` closes itself after any request that fails.
    omni = AsyncOmni(
        model=str(checkpoint),
        deploy_config=str(deploy_file),
        log_stats=False,
        stage_init_timeout=900,
        init_timeout=900,
    )
    greedy = {"temperature": 0, "ignore_eos": True, "output_kind": RequestOutputKind.FINAL_ONLY}
    sampling = [
        SamplingParams(max_tokens=6, **greedy),
        SamplingParams(max_tokens=12, repetition_penalty=1.05, **greedy),
    ]
    answers = []
    for index in range(NUM_TIMES):
        answer: dict[str, Any] = {}
        try:
            async for output in omni.generate(
                PROMPT.for_engine(), request_id=str(index), sampling_params_list=sampling
            ):
                request_output = getattr(output, "request_output", output)
                answer[str(output.stage_id)] = list(request_output.outputs[0].token_ids)
        except Exception as error:
            answer["error"] = f"{type(error).__name__}: {error}"
        answers.append(answer)
        result.write_text(json.dumps(answers))
    omni.shutdown()


def main(checkpoint: Path, result: Path) -> None:
    use_cpu_platform()
    _register_pipeline()
    asyncio.run(ask_again_and_again(checkpoint, result))


if __name__ == "__main__":
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
    main(Path(sys.argv[1]), Path(sys.argv[2]))

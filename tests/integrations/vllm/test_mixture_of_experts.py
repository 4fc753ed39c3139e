"""Qwen3-VL's mixture of experts: the same encoder and merge over another language model, everything compiled."""

import shutil

import pytest
from engines import mixed_requests, serve, small_media, start

pytest.importorskip("vllm", reason="vLLM is not installed (extra 'cpu')")

import torch
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def mixture(checkpoint, tmp_path_factory):
    """The small model with experts instead of its dense layers, random as well."""
    from transformers import AutoConfig, Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    directory = tmp_path_factory.mktemp("mixture") / "model"
    shutil.copytree(checkpoint, directory, ignore=shutil.ignore_patterns("*.safetensors*"))
    dense = AutoConfig.from_pretrained(checkpoint).to_dict()
    text, vision = (
        {key: value for key, value in dense[part].items() if key not in ("model_type", "architectures")}
        for part in ("text_config", "vision_config")
    )
    text |= {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
    tokens = {name: value for name, value in dense.items() if name.endswith("_token_id")}
    config = Qwen3VLMoeConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **tokens)
    config.architectures = ["Qwen3VLMoeForConditionalGeneration"]
    model = Qwen3VLMoeForConditionalGeneration(config).float()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim >= 2:
                # Scaled, so that the output depends on the picture.
                fan_in = 1 if "embed_tokens" in name else weight[0].numel() if weight.ndim == 2 else weight.shape[-1]
                weight.copy_(torch.randn(weight.shape, generator=generator) / fan_in**0.5)
    model.save_pretrained(directory)
    # Published files, which vLLM reads, have experts' weights the other way round.
    for file in directory.glob("*.safetensors"):
        weights = load_file(file)
        turned = {name: w.transpose(-1, -2).contiguous() if "experts" in name else w for name, w in weights.items()}
        save_file(turned, file, metadata={"format": "pt"})
    return directory


def test_tokens_are_those_of_stock(mixture):
    media, requests = small_media(), mixed_requests()
    stock = start(mixture, None)
    expected = serve(stock, requests, media, max_tokens=8)
    stock.close()
    cache = {"lane": "eager", "compiled_encoder": True, "compiled_prefill": True}
    ours = start(mixture, cache, encoder={"encoder_attention_block_size": 4096})
    tokens = serve(ours, requests, media, max_tokens=8)
    (stats,) = ours.llm.collective_rpc("encoder_cache_stats")
    ours.manager.check_integrity()
    ours.llm.collective_rpc("check_encoder_cache_integrity")
    ours.close()

    assert tokens == expected
    assert len(set(expected)) > len(requests) / 2
    assert stats["encoder_launches"] > 0 < stats["rows_read"]
    assert stats["items_written"] == 6

"""Builds a small random Qwen3-VL checkpoint: the whole architecture at 1.5 million parameters, without a download.

The sizes are chosen so that every part does real work: three deepstack levels, so that a row of the encoder cache is
four hidden states wide, and weights scaled so that the output depends on the image.
"""

from pathlib import Path

from vllm_neuron_cache.demo.recipe import (
    END_OF_TEXT,
    END_OF_TURN,
    START_OF_TURN,
    build_once,
    byte_tokenizer,
    chat_prompt,
    chat_template,
    default_directory,
    randomise,
    write_generation_config,
    write_json,
)

__all__ = [
    "CHECKPOINT_VERSION",
    "IMAGE_PLACEHOLDER",
    "VIDEO_PLACEHOLDER",
    "build_checkpoint",
    "chat_prompt",
    "default_checkpoint_dir",
]

CHECKPOINT_VERSION = 1
"""Raised whenever the recipe below changes, so that an older checkpoint is not taken for this one."""

IMAGE_PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO_PLACEHOLDER = "<|vision_start|><|video_pad|><|vision_end|>"

MAX_IMAGE_PIXELS = 1024 * 1024
MAX_VIDEO_PIXELS = 512 * 512 * 16

_HIDDEN_SIZE = 128
_PATCH_SIZE = 16
_MERGE_SIZE = 2
_SPECIAL_TOKENS = (
    END_OF_TEXT,
    START_OF_TURN,
    END_OF_TURN,
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_CHAT_TEMPLATE = chat_template({("image", "image_url"): IMAGE_PLACEHOLDER, ("video", "video_url"): VIDEO_PLACEHOLDER})


def default_checkpoint_dir() -> Path:
    """Where the checkpoint is kept between runs."""
    return default_directory(f"tiny-qwen3-vl-{CHECKPOINT_VERSION}")


def build_checkpoint(directory: Path | None = None) -> Path:
    """Builds the checkpoint unless it is there, and returns its directory.

    The directory appears whole or not at all, so that an interrupted or a concurrent build does no harm.
    Raises `DemoError` if `directory` exists and holds something else.
    """
    return build_once(directory or default_checkpoint_dir(), str(CHECKPOINT_VERSION), _write_checkpoint)


def _write_checkpoint(directory: Path) -> None:
    import torch
    from transformers import Qwen3VLForConditionalGeneration

    tokenizer = byte_tokenizer(_SPECIAL_TOKENS, _CHAT_TEMPLATE)
    tokenizer.save_pretrained(directory)
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in _SPECIAL_TOKENS}
    torch.manual_seed(1234)
    model = Qwen3VLForConditionalGeneration(_config(len(tokenizer), ids)).eval()
    _randomise(model)
    model.save_pretrained(directory)
    write_generation_config(directory, tokenizer)
    processor = {
        "processor_class": "Qwen3VLProcessor",
        "patch_size": _PATCH_SIZE,
        "temporal_patch_size": 2,
        "merge_size": _MERGE_SIZE,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "do_rescale": True,
        "do_normalize": True,
        "do_resize": True,
        "do_convert_rgb": True,
        "rescale_factor": 1 / 255,
        "resample": 3,
    }
    write_json(
        directory / "preprocessor_config.json",
        processor
        | {
            "image_processor_type": "Qwen2VLImageProcessor",
            "size": {"longest_edge": MAX_IMAGE_PIXELS, "shortest_edge": 32 * 32},
        },
    )
    write_json(
        directory / "video_preprocessor_config.json",
        processor
        | {
            "video_processor_type": "Qwen3VLVideoProcessor",
            "size": {"longest_edge": MAX_VIDEO_PIXELS, "shortest_edge": 64 * 64},
            "do_sample_frames": True,
            "fps": 2,
            "min_frames": 4,
            "max_frames": 64,
        },
    )
    (directory / "chat_template.jinja").write_text(_CHAT_TEMPLATE)


def _config(vocabulary: int, ids: dict[str, int]):
    from transformers import Qwen3VLConfig

    config = Qwen3VLConfig(
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
        dtype="float32",
        text_config={
            # vLLM 0.29 reads the architecture of the text model here.
            "architectures": ["Qwen3ForCausalLM"],
            "vocab_size": -(-vocabulary // 64) * 64,
            "hidden_size": _HIDDEN_SIZE,
            "intermediate_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,  # the smallest that vLLM's CPU attention takes
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5000000.0,
                "mrope_interleaved": True,
                "mrope_section": [6, 5, 5],
            },
            "dtype": "float32",
        },
        vision_config={
            "depth": 6,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "out_hidden_size": _HIDDEN_SIZE,
            "patch_size": _PATCH_SIZE,
            "spatial_merge_size": _MERGE_SIZE,
            "temporal_patch_size": 2,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [1, 3, 5],
            "in_channels": 3,
            "dtype": "float32",
        },
    )
    config.architectures = ["Qwen3VLForConditionalGeneration"]
    return config


def _randomise(model) -> None:
    import torch

    generator = randomise(model)
    with torch.no_grad():
        positions = model.model.visual.pos_embed.weight
        positions.copy_(torch.randn(positions.shape, generator=generator) * 0.02)
        embeddings = model.model.language_model.embed_tokens.weight
        embeddings.copy_(torch.randn(embeddings.shape, generator=generator))

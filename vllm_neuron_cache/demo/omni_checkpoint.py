"""Builds a small random checkpoint of Qwen2.5-Omni's thinker, which hears and sees, at 1.1 million parameters.

The rows of its encoders are one hidden state wide. The talker's configuration is the default one and has no weights:
vLLM serves the thinker alone.
"""

from pathlib import Path

from vllm_neuron_cache.demo.media import SAMPLING_RATE
from vllm_neuron_cache.demo.recipe import (
    END_OF_TEXT,
    END_OF_TURN,
    START_OF_TURN,
    build_once,
    byte_tokenizer,
    chat_template,
    default_directory,
    randomise,
    write_generation_config,
    write_json,
)

OMNI_CHECKPOINT_VERSION = 1
"""Raised whenever the recipe below changes, so that an older checkpoint is not taken for this one."""

AUDIO_PLACEHOLDER = "<|audio_bos|><|AUDIO|><|audio_eos|>"
IMAGE_PLACEHOLDER = "<|vision_bos|><|IMAGE|><|vision_eos|>"
VIDEO_PLACEHOLDER = "<|vision_bos|><|VIDEO|><|vision_eos|>"

MAX_IMAGE_PIXELS = 512 * 512
MAX_AUDIO_SECONDS = 30

_HIDDEN_SIZE = 128
_PATCH_SIZE = 14
_MERGE_SIZE = 2
_MEL_BINS = 128
_HOP_LENGTH = 160
_NAMED_TOKENS = {
    "audio_token": "<|AUDIO|>",
    "image_token": "<|IMAGE|>",
    "video_token": "<|VIDEO|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
}
_SPECIAL_TOKENS = (END_OF_TEXT, START_OF_TURN, END_OF_TURN, *_NAMED_TOKENS.values())
_CHAT_TEMPLATE = chat_template(
    {
        ("audio", "audio_url", "input_audio"): AUDIO_PLACEHOLDER,
        ("image", "image_url"): IMAGE_PLACEHOLDER,
        ("video", "video_url"): VIDEO_PLACEHOLDER,
    }
)


def default_omni_checkpoint_dir() -> Path:
    """Where the checkpoint is kept between runs."""
    return default_directory(f"tiny-qwen2.5-omni-{OMNI_CHECKPOINT_VERSION}")


def build_omni_checkpoint(directory: Path | None = None) -> Path:
    """Builds the checkpoint unless it is there, and returns its directory.

    The directory appears whole or not at all, so that an interrupted or a concurrent build does no harm.
    Raises `DemoError` if `directory` exists and holds something else.
    """
    return build_once(directory or default_omni_checkpoint_dir(), f"omni-{OMNI_CHECKPOINT_VERSION}", _write_checkpoint)


def _write_checkpoint(directory: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen2_5OmniThinkerForConditionalGeneration

    tokenizer = byte_tokenizer(_SPECIAL_TOKENS, _CHAT_TEMPLATE, **_NAMED_TOKENS)
    tokenizer.save_pretrained(directory)
    config = _config(len(tokenizer), {token: tokenizer.convert_tokens_to_ids(token) for token in _SPECIAL_TOKENS})
    config.save_pretrained(directory)
    torch.manual_seed(1234)
    model = Qwen2_5OmniThinkerForConditionalGeneration(config.thinker_config).eval()
    generator = randomise(model)
    with torch.no_grad():
        embeddings = model.model.embed_tokens.weight
        embeddings.copy_(torch.randn(embeddings.shape, generator=generator))
        # Sharper attention: otherwise one row of a picture or a sound more or less changes no token.
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(2)
            layer.self_attn.k_proj.weight.mul_(2)
    # As in the whole model's checkpoints, where the thinker is one part of three.
    weights = {f"thinker.{name}": weight.contiguous() for name, weight in model.state_dict().items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    write_generation_config(directory, tokenizer)
    write_json(
        directory / "preprocessor_config.json",
        {
            "processor_class": "Qwen2_5OmniProcessor",
            "image_processor_type": "Qwen2VLImageProcessor",
            "feature_extractor_type": "WhisperFeatureExtractor",
            "patch_size": _PATCH_SIZE,
            "temporal_patch_size": 2,
            "merge_size": _MERGE_SIZE,
            "min_pixels": (_PATCH_SIZE * _MERGE_SIZE * 2) ** 2,
            "max_pixels": MAX_IMAGE_PIXELS,
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
            "feature_size": _MEL_BINS,
            "sampling_rate": SAMPLING_RATE,
            "hop_length": _HOP_LENGTH,
            "n_fft": 400,
            "chunk_length": MAX_AUDIO_SECONDS,
            "n_samples": MAX_AUDIO_SECONDS * SAMPLING_RATE,
            "nb_max_frames": MAX_AUDIO_SECONDS * SAMPLING_RATE // _HOP_LENGTH,
            "padding_side": "left",
            "padding_value": 0.0,
            "return_attention_mask": True,
            "dither": 0.0,
        },
    )
    (directory / "chat_template.jinja").write_text(_CHAT_TEMPLATE)


def _config(vocabulary: int, ids: dict[str, int]):
    from transformers import Qwen2_5OmniConfig

    config = Qwen2_5OmniConfig(
        enable_audio_output=False,
        thinker_config={
            "audio_token_index": ids["<|AUDIO|>"],
            "image_token_index": ids["<|IMAGE|>"],
            "video_token_index": ids["<|VIDEO|>"],
            "audio_start_token_id": ids["<|audio_bos|>"],
            "audio_end_token_id": ids["<|audio_eos|>"],
            "vision_start_token_id": ids["<|vision_bos|>"],
            "vision_end_token_id": ids["<|vision_eos|>"],
            "position_id_per_seconds": 25,
            "seconds_per_chunk": 2,
            "text_config": {
                "vocab_size": -(-vocabulary // 64) * 64,
                "hidden_size": _HIDDEN_SIZE,
                "intermediate_size": 256,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,  # heads of 32, the smallest that vLLM's CPU attention takes
                "max_position_embeddings": 32768,
                "rms_norm_eps": 1e-6,
                "tie_word_embeddings": False,
                "eos_token_id": ids[END_OF_TURN],
                "pad_token_id": ids[END_OF_TEXT],
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1000000.0,
                    "mrope_section": [6, 5, 5],
                },
            },
            "audio_config": {
                "num_mel_bins": _MEL_BINS,
                "encoder_layers": 2,
                "encoder_attention_heads": 4,
                "encoder_ffn_dim": 128,
                "d_model": 64,
                "n_window": 100,
                "max_source_positions": 1500,
                "output_dim": _HIDDEN_SIZE,
            },
            "vision_config": {
                "depth": 4,
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_heads": 4,
                "patch_size": _PATCH_SIZE,
                "spatial_merge_size": _MERGE_SIZE,
                "temporal_patch_size": 2,
                "window_size": 112,
                "fullatt_block_indexes": [1, 3],
                "in_channels": 3,
                "out_hidden_size": _HIDDEN_SIZE,
            },
        },
    )
    config.architectures = ["Qwen2_5OmniModel"]
    config.dtype = "float32"
    return config

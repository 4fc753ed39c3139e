"""Builds a small random Qwen3-VL checkpoint: the whole architecture at 1.5 million parameters, without a download.

The sizes are chosen so that every part does real work: three deepstack levels, so that a row of the encoder cache is
four hidden states wide, and weights scaled so that the output depends on the image.
"""

import json
import shutil
import tempfile
from pathlib import Path

from vllm_neuron_cache.errors import DemoError

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
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_CORPUS = (
    "Describe this picture in one sentence. What is the colour of the object in the picture? How many are there? "
    "You are a helpful assistant. user assistant system video frame second seconds. "
)
_CHAT_TEMPLATE = (
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n"
    "{%- if message.content is string %}{{ message.content }}"
    "{%- else %}{%- for part in message.content %}"
    "{%- if part.type in ('image', 'image_url') %}"
    + IMAGE_PLACEHOLDER
    + "{%- elif part.type in ('video', 'video_url') %}"
    "" + VIDEO_PLACEHOLDER + "{%- elif part.type == 'text' %}{{ part.text }}{%- endif %}{%- endfor %}{%- endif %}"
    "<|im_end|>\n{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n{%- endif %}"
)


def chat_prompt(content: str) -> str:
    """A one-turn prompt around `content`, which holds text and placeholders."""
    return f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"


def default_checkpoint_dir() -> Path:
    """Where the checkpoint is kept between runs."""
    return Path.home() / ".cache" / "vllm_neuron_cache" / f"tiny-qwen3-vl-{CHECKPOINT_VERSION}"


def build_checkpoint(directory: Path | None = None) -> Path:
    """Builds the checkpoint unless it is there, and returns its directory.

    The directory appears whole or not at all, so that an interrupted or a concurrent build does no harm.
    Raises `DemoError` if `directory` exists and holds something else.
    """
    directory = directory or default_checkpoint_dir()
    marker = directory / "checkpoint_version"
    if marker.is_file() and marker.read_text() == str(CHECKPOINT_VERSION):
        return directory
    if directory.exists():
        raise DemoError(
            f"{directory} exists and is not version {CHECKPOINT_VERSION} of the demo's checkpoint. "
            "Remove it or name another directory."
        )
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    except OSError as error:
        raise DemoError(f"cannot make {directory}: {error.strerror}. Name a directory that can be made.") from error
    try:
        _write_checkpoint(unfinished)
        (unfinished / marker.name).write_text(str(CHECKPOINT_VERSION))
        try:
            unfinished.rename(directory)
        except OSError:  # someone else was faster
            if not marker.is_file():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return directory


def _write_checkpoint(directory: Path) -> None:
    import torch
    from transformers import Qwen3VLForConditionalGeneration

    tokenizer = _tokenizer()
    tokenizer.save_pretrained(directory)
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in _SPECIAL_TOKENS}
    torch.manual_seed(1234)
    model = Qwen3VLForConditionalGeneration(_config(len(tokenizer), ids)).eval()
    _randomise(model)
    model.save_pretrained(directory)
    _write_json(
        directory / "generation_config.json",
        {"eos_token_id": [ids["<|im_end|>"]], "pad_token_id": ids["<|endoftext|>"], "do_sample": False},
    )
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
    _write_json(
        directory / "preprocessor_config.json",
        processor
        | {
            "image_processor_type": "Qwen2VLImageProcessor",
            "size": {"longest_edge": MAX_IMAGE_PIXELS, "shortest_edge": 32 * 32},
        },
    )
    _write_json(
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


def _tokenizer():
    """A byte-level BPE with a few hundred merges and the special tokens that Qwen3-VL needs."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator([_CORPUS] * 20, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL_TOKENS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(_SPECIAL_TOKENS),
        model_max_length=32768,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = _CHAT_TEMPLATE
    return fast


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
    """Scales weights to 1/sqrt(fan_in): with the usual 0.02 the language model barely sees the image."""
    import torch

    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                fan_in = parameter[0].numel()
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / fan_in**0.5)
        positions = model.model.visual.pos_embed.weight
        positions.copy_(torch.randn(positions.shape, generator=generator) * 0.02)
        embeddings = model.model.language_model.embed_tokens.weight
        embeddings.copy_(torch.randn(embeddings.shape, generator=generator))


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=1))

"""What the recipes of the small random checkpoints share: building once, a tokenizer, a chat template, weights."""

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_neuron_cache.errors import DemoError

END_OF_TEXT = "<|endoftext|>"
START_OF_TURN = "<|im_start|>"
END_OF_TURN = "<|im_end|>"

_CORPUS = (
    "Describe this picture in one sentence. What is the colour of the object in the picture? How many are there? "
    "You are a helpful assistant. user assistant system video frame second seconds. "
)


def chat_prompt(content: str) -> str:
    """A one-turn prompt around `content`, which holds text and placeholders."""
    return f"{START_OF_TURN}user\n{content}{END_OF_TURN}\n{START_OF_TURN}assistant\n"


def chat_template(placeholders: Mapping[tuple[str, ...], str]) -> str:
    """A Jinja template of such turns. `placeholders` says what stands for the parts of a message by their types."""
    branches = "".join(f"if part.type in {types} %}}{text}{{%- el" for types, text in placeholders.items())
    return (
        "{%- for message in messages %}<|im_start|>{{ message.role }}\n"
        "{%- if message.content is string %}{{ message.content }}"
        "{%- else %}{%- for part in message.content %}{%- "
        + branches
        + "if part.type == 'text' %}{{ part.text }}{%- endif %}{%- endfor %}{%- endif %}"
        "<|im_end|>\n{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n{%- endif %}"
    )


def default_directory(name: str) -> Path:
    """Where a checkpoint is kept between runs."""
    return Path.home() / ".cache" / "vllm_neuron_cache" / name


def build_once(directory: Path, version: str, write: Callable[[Path], None]) -> Path:
    """Has `write` fill `directory` with a checkpoint unless this `version` of it is there, and returns the directory.

    The directory appears whole or not at all, so that an interrupted or a concurrent build does no harm.
    Raises `DemoError` if `directory` exists and holds something else.
    """
    marker = directory / "checkpoint_version"
    if marker.is_file() and marker.read_text() == version:
        return directory
    if directory.exists():
        raise DemoError(
            f"{directory} exists and is not version {version} of the demo's checkpoint. "
            "Remove it or name another directory."
        )
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    except OSError as error:
        raise DemoError(f"cannot make {directory}: {error.strerror}. Name a directory that can be made.") from error
    try:
        write(unfinished)
        (unfinished / marker.name).write_text(version)
        try:
            unfinished.rename(directory)
        except OSError:  # someone else was faster
            if not marker.is_file():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return directory


def byte_tokenizer(special_tokens: Sequence[str], template: str, **named_tokens: str) -> Any:
    """A byte-level BPE with a few hundred merges, and `special_tokens`, the three above among them.

    `named_tokens` become attributes of the tokenizer (`image_token`, for one), where a processor looks them up.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator([_CORPUS] * 20, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special_tokens])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        additional_special_tokens=list(special_tokens),
        model_max_length=32768,
        clean_up_tokenization_spaces=False,
        **({"model_specific_special_tokens": named_tokens} if named_tokens else {}),
    )
    fast.chat_template = template
    return fast


def randomise(model: Any) -> Any:
    """Scales weights to 1/sqrt(fan_in): with the usual 0.02 a language model barely sees the media. Mutates `model`.

    Returns the generator, for weights that are to be drawn in another way.
    """
    import torch

    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                fan_in = parameter[0].numel()
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / fan_in**0.5)
    return generator


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=1))


def write_generation_config(directory: Path, tokenizer: Any) -> None:
    """Greedy, to the end of the turn."""
    end, pad = tokenizer.convert_tokens_to_ids([END_OF_TURN, END_OF_TEXT])
    write_json(directory / "generation_config.json", {"eos_token_id": [end], "pad_token_id": pad, "do_sample": False})

"""What the planner needs to know of a model, read from its configuration files. Nothing is downloaded."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from vllm_neuron_cache.errors import PlannerError
from vllm_neuron_cache.planner.families import IMAGE_LIMITS, AudioRule, Family, PixelLimits, find_family

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8}
MODEL_DTYPES = ("bfloat16", "float16", "float32")


class StageKey(NamedTuple):
    """One tensor per token that an omni stage hands on, which the stage cache keeps on the host."""

    name: str
    width: int
    dtype: str


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a model that decide what the cache costs."""

    family: str
    patch_size: int
    """Pixels along one side of a patch."""
    merge_size: int
    """Patches along one side of the square that becomes one token row."""
    temporal_patch_size: int
    """Frames that become one."""
    hidden_size: int
    """Width of the language model's hidden state, and of what the merger gives."""
    num_deepstack_levels: int
    dtype: str
    image_limits: PixelLimits
    """Limits for one image."""
    video_limits: PixelLimits
    """Limits for one frame, or for all frames together where `whole_video_limits` is set."""
    whole_video_limits: bool
    frames_apart: bool
    """Whether the cache sees a video frame by frame, and keeps frames within the encoder's blocks."""
    audio: AudioRule | None
    max_model_len: int
    """Tokens of the longest sequence, as vLLM derives it: `max_position_embeddings`."""
    stage_keys: tuple[StageKey, ...] = ()
    """What the stage cache would keep; empty for a model that is no omni pipeline."""
    model_type: str = ""
    """Of config.json."""
    towers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The parts of config.json that describe encoders, by name."""
    notes: tuple[str, ...] = ()
    """Where a value is not the files' own."""

    @property
    def fat_dim(self) -> int:
        """Width of a row of the encoder cache: the hidden state and one more per deepstack level."""
        return self.hidden_size * (1 + self.num_deepstack_levels)

    @property
    def token_pixels(self) -> int:
        """Pixels along one side of the square that becomes one token row."""
        return self.patch_size * self.merge_size

    @property
    def merge_factor(self) -> int:
        """Patches that become one token row."""
        return self.merge_size**2

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def row_bytes(self) -> int:
        return self.fat_dim * self.dtype_bytes


class _Section:
    """An object in a JSON file, whose errors name the file and the key."""

    def __init__(self, file: Path, values: Any, path: str = "") -> None:
        self.file = file
        self.path = path
        if not isinstance(values, dict):
            raise PlannerError(f"{file}: {path or 'the file'} is not an object of keys and values.")
        self.values: dict[str, Any] = values

    def name(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def section(self, key: str) -> "_Section":
        return _Section(self.file, self.required(key), self.name(key))

    def required(self, key: str) -> Any:
        if self.values.get(key) is None:
            raise PlannerError(
                f"{self.file}: {self.name(key)} is missing. Take config.json from the checkpoint as it was published."
            )
        return self.values[key]

    def size(self, key: str, minimum: int = 1) -> int:
        value = self.required(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise PlannerError(
                f"{self.file}: {self.name(key)} is {value!r}, and has to be a whole number of at least {minimum}."
            )
        return value


def load_model_shape(path: Path, *, dtype: str = "auto") -> ModelShape:
    """Reads the sizes from a checkpoint's folder, or from a config.json with the processors' files beside it.

    `dtype` is vLLM's option of that name: "auto" takes the file's, and bfloat16 for a float32 checkpoint.

    Raises `PlannerError` for a file that is missing or says something unusable, and for other families.
    """
    file = path / "config.json" if path.is_dir() else path
    config = _Section(file, _read_json(file))
    family = find_family(config.values.get("model_type"), file)
    model = config.section("thinker_config") if "thinker_config" in config.values else config
    vision = model.section("vision_config")
    # Releases before transformers 5 keep the language model's keys beside `vision_config`.
    text = model.section("text_config") if "text_config" in model.values else model
    patch_size, merge_size = vision.size("patch_size"), vision.size("spatial_merge_size")
    hidden_size = vision.size(family.vision_hidden_key)
    if text.size("hidden_size") != hidden_size:
        raise PlannerError(
            f"{file}: {text.name('hidden_size')} is {text.size('hidden_size')} and "
            f"{vision.name(family.vision_hidden_key)} {hidden_size}. The rows of the encoder go into the language "
            "model's input, so the two have to agree."
        )
    notes: list[str] = []
    image_limits, video_limits, whole_video = _processor_limits(file, family, vision, notes)
    dtype = _dtype(dtype, config, model, text, notes)
    return ModelShape(
        family=family.name,
        patch_size=patch_size,
        merge_size=merge_size,
        temporal_patch_size=vision.size("temporal_patch_size"),
        hidden_size=hidden_size,
        num_deepstack_levels=_deepstack_levels(vision),
        dtype=dtype,
        image_limits=image_limits,
        video_limits=video_limits,
        whole_video_limits=whole_video,
        frames_apart=family.frames_apart,
        audio=family.audio,
        max_model_len=text.size("max_position_embeddings"),
        stage_keys=_stage_keys(family, config, hidden_size, dtype),
        model_type=family.model_type,
        towers={name: model.values[name] for name in ("vision_config", "audio_config") if name in model.values},
        notes=tuple(notes),
    )


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlannerError(
            f"cannot read {file}: {error.strerror}. Name the folder of a checkpoint, or its config.json; "
            "nothing is downloaded."
        ) from error
    except ValueError as error:
        raise PlannerError(f"{file} is not JSON: {error}.") from error


def _deepstack_levels(vision: _Section) -> int:
    # Families without deepstack do not have the key, and vLLM takes an absent or empty list as no level.
    levels = vision.values.get("deepstack_visual_indexes") or []
    if not isinstance(levels, list):
        raise PlannerError(
            f"{vision.file}: {vision.name('deepstack_visual_indexes')} is {levels!r}, and has to be a list."
        )
    return len(levels)


def _dtype(wanted: str, config: _Section, model: _Section, text: _Section, notes: list[str]) -> str:
    if wanted != "auto":
        if wanted not in MODEL_DTYPES:
            raise PlannerError(f"dtype is {wanted!r}; give auto or one of {', '.join(MODEL_DTYPES)}.")
        return wanted
    for section in (text, model, config):
        for key in ("dtype", "torch_dtype"):
            value = section.values.get(key)
            if value is None:
                continue
            if value not in MODEL_DTYPES:
                raise PlannerError(
                    f"{section.file}: {section.name(key)} is {value!r}, and the planner knows "
                    f"{', '.join(MODEL_DTYPES)}. Give --dtype."
                )
            if value == "float32":
                # vLLM's `_resolve_auto_dtype` (vllm/config/model.py, 0.30.0).
                notes.append("The checkpoint is float32, which vLLM serves in bfloat16 unless --dtype says otherwise.")
                return "bfloat16"
            return value
    notes.append(f"{config.file.name} names no dtype; bfloat16 was taken.")
    return "bfloat16"


def _processor_limits(
    config_file: Path, family: Family, vision: _Section, notes: list[str]
) -> tuple[PixelLimits, PixelLimits, bool]:
    """Limits for images, for video, and whether the latter bound the whole video, as transformers would load them."""
    folder = config_file.parent
    image = _processor_section(folder, "image_processor", ("preprocessor_config.json",))
    video = _processor_section(
        folder, "video_processor", ("video_preprocessor_config.json", "preprocessor_config.json")
    )
    if image is None:
        notes.append(
            "There is no preprocessor_config.json: limits for images are the defaults of transformers, and the "
            "checkpoint's own may be far larger."
        )
        image_limits = IMAGE_LIMITS
    else:
        _check_agreement(image, vision)
        image_limits = _limits(image, IMAGE_LIMITS, from_pixels=True)
    whole_video = family.whole_video_limits
    if video is None or not family.video_limits_from_files:
        if family.video_limits_from_files:
            notes.append("There is no file of the video processor: limits for video are the defaults of transformers.")
        return image_limits, family.video_limits, whole_video
    _check_agreement(video, vision)
    # Qwen3VLVideoProcessor reads `size` alone.
    return image_limits, _limits(video, family.video_limits, from_pixels=not whole_video), whole_video


def _processor_section(folder: Path, nested: str, names: tuple[str, ...]) -> _Section | None:
    """The processor's object, in the order in which transformers 5 looks: nested first, then files of its own."""
    file = folder / "processor_config.json"
    if file.is_file():
        values = _Section(file, _read_json(file)).values.get(nested)
        if values is not None:
            return _Section(file, values, nested)
    for name in names:
        if (folder / name).is_file():
            return _Section(folder / name, _read_json(folder / name))
    return None


def _limits(section: _Section, default: PixelLimits, *, from_pixels: bool) -> PixelLimits:
    if section.values.get("size") is not None:
        size = section.section("size")
        limits = PixelLimits(size.size("shortest_edge"), size.size("longest_edge"))
    else:
        limits = default
    if from_pixels:  # `min_pixels` and `max_pixels`, the older names, win over `size`
        for key in ("min_pixels", "max_pixels"):
            if section.values.get(key) is not None:
                limits = limits._replace(**{key: section.size(key)})
    if limits.min_pixels > limits.max_pixels:
        raise PlannerError(
            f"{section.file}: the least number of pixels is {limits.min_pixels} and the largest {limits.max_pixels}."
        )
    return limits


def _check_agreement(section: _Section, vision: _Section) -> None:
    for key, other in (
        ("patch_size", "patch_size"),
        ("merge_size", "spatial_merge_size"),
        ("temporal_patch_size", "temporal_patch_size"),
    ):
        if section.values.get(key) is not None and section.size(key) != vision.size(other):
            raise PlannerError(
                f"{section.file}: {section.name(key)} is {section.size(key)}, and {vision.file.name} has "
                f"{vision.size(other)} in {vision.name(other)}. Take both files from one checkpoint."
            )


def _stage_keys(family: Family, config: _Section, hidden_size: int, dtype: str) -> tuple[StageKey, ...]:
    if not family.has_thinker:
        return ()
    keys = [StageKey("hidden states of the thinker", hidden_size, dtype)]
    talker = config.values.get("talker_config")
    if isinstance(talker, dict) and talker.get("num_code_groups") is not None:
        groups = _Section(config.file, talker, "talker_config").size("num_code_groups")
        keys.append(StageKey("codes of the talker", groups, "int64"))
    return tuple(keys)

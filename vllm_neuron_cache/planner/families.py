"""What the planner knows about each family of models that their configuration files do not say."""

from dataclasses import dataclass
from typing import NamedTuple

from vllm_neuron_cache.errors import PlannerError


class PixelLimits(NamedTuple):
    """Bounds that a processor resizes into, in pixels."""

    min_pixels: int
    max_pixels: int


@dataclass(frozen=True, kw_only=True)
class AudioRule:
    """How many token rows an audio clip gives, from its mel frames (100 a second)."""

    rows_per_chunk: int | None = None
    """Rows that each full chunk of 100 mel frames gives; None where clips are not cut into chunks."""


# `size` of transformers 5.14.1's Qwen2VLImageProcessor (transformers/models/qwen2_vl/image_processing_qwen2_vl.py),
# which every family here uses; AutoImageProcessor maps them all to it. Released checkpoints of Qwen3-VL ship larger
# limits of their own, which is why the report says when these were used.
IMAGE_LIMITS = PixelLimits(56 * 56, 28 * 28 * 1280)

# `size` of the same release's Qwen2VLVideoProcessor (models/qwen2_vl/video_processing_qwen2_vl.py), and what
# Qwen2_5OmniProcessorKwargs gives that class (models/qwen2_5_omni/processing_qwen2_5_omni.py).
FRAME_LIMITS = PixelLimits(128 * 28 * 28, 28 * 28 * 768)

# `size` of Qwen3VLVideoProcessor (models/qwen3_vl/video_processing_qwen3_vl.py), and what Qwen3OmniMoeProcessorKwargs
# gives Qwen2VLVideoProcessor (models/qwen3_omni_moe/processing_qwen3_omni_moe.py).
QWEN3_VIDEO_LIMITS = PixelLimits(128 * 32 * 32, 32 * 32 * 768)


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family, as `model_type` of its config.json names it."""

    name: str
    model_type: str
    vision_hidden_key: str = "out_hidden_size"
    """Key in `vision_config` of the width that the merger gives."""
    video_limits: PixelLimits = FRAME_LIMITS
    """Limits for video where no file gives them."""
    whole_video_limits: bool = False
    """Whether limits for video bound all frames together, as Qwen3VLVideoProcessor does, or each frame alone."""
    video_limits_from_files: bool = True
    """Whether the processor files can change the limits for video. The omni processors pass `size` at every call,
    which wins over the files."""
    frames_apart: bool = False
    """Whether text stands between a video's frames in the prompt, so that the cache sees where each frame ends."""
    audio: AudioRule | None = None

    @property
    def has_thinker(self) -> bool:
        """Whether the model that sees media lies under `thinker_config`."""
        return self.audio is not None


FAMILIES = (
    # In Qwen2-VL `hidden_size` of the vision tower is what comes out; inside it is `embed_dim`.
    Family(name="Qwen2-VL", model_type="qwen2_vl", vision_hidden_key="hidden_size"),
    Family(name="Qwen2.5-VL", model_type="qwen2_5_vl"),
    Family(
        name="Qwen3-VL",
        model_type="qwen3_vl",
        video_limits=QWEN3_VIDEO_LIMITS,
        whole_video_limits=True,
        frames_apart=True,
    ),
    Family(
        name="Qwen3-VL MoE",
        model_type="qwen3_vl_moe",
        video_limits=QWEN3_VIDEO_LIMITS,
        whole_video_limits=True,
        frames_apart=True,
    ),
    Family(name="Qwen2.5-Omni", model_type="qwen2_5_omni", video_limits_from_files=False, audio=AudioRule()),
    Family(
        name="Qwen3-Omni",
        model_type="qwen3_omni_moe",
        video_limits=QWEN3_VIDEO_LIMITS,
        video_limits_from_files=False,
        # _get_feat_extract_output_lengths in transformers' models/qwen3_omni_moe/processing_qwen3_omni_moe.py.
        audio=AudioRule(rows_per_chunk=13),
    ),
)


def find_family(model_type: object, file: object) -> Family:
    """The family of a `model_type`, also that of a thinker alone. Raises `PlannerError` that lists the families."""
    for family in FAMILIES:
        thinker = f"{family.model_type}_thinker"
        if model_type == family.model_type or (family.has_thinker and model_type == thinker):
            return family
    known = ", ".join(f"{family.name} ({family.model_type})" for family in FAMILIES)
    raise PlannerError(
        f"{file}: model_type is {model_type!r}, and the planner knows {known}. Give the folder or config.json of one."
    )

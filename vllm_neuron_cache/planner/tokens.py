"""How many token rows an item gives: sizes in pixels, frames and seconds, resized as the Qwen processors do it.

The arithmetic follows transformers 5.14.1: `smart_resize` of models/qwen2_vl/image_processing_qwen2_vl.py for images
and single frames, and that of models/qwen3_vl/video_processing_qwen3_vl.py where limits bound a whole video. The
largest items follow vLLM 0.30.0, vllm/model_executor/models/{qwen2_vl,qwen3_vl,qwen2_audio}.py, because they decide
the scheduler's budget.
"""

import math

from vllm_neuron_cache.errors import PlannerError
from vllm_neuron_cache.planner.model import ModelShape

MAX_ASPECT_RATIO = 200
"""Both `smart_resize` functions refuse more."""

MEL_FRAMES_PER_SECOND = 100
"""Sampling rate 16,000 over hop length 160, of WhisperFeatureExtractor in the omni checkpoints."""

_MAX_PROFILED_FRAMES = 14
"""`_MAX_FRAMES_PER_VIDEO` of vLLM's qwen2_vl.py: the longest video that its budget counts on."""

_PROFILED_AUDIO_SECONDS = 30


def image_tokens(shape: ModelShape, width: int, height: int) -> int:
    """Token rows of an image of `width` x `height` pixels. Raises `PlannerError` for a size the processor refuses."""
    columns, rows = _resized(shape, width, height, *shape.image_limits)
    return columns * rows


def video_frame_tokens(shape: ModelShape, width: int, height: int, frames: int) -> tuple[int, ...]:
    """Token rows of each merged frame of a video of `frames` sampled frames.

    `temporal_patch_size` sampled frames merge into one; the last is filled up.
    Raises `PlannerError` for a size the processor refuses.
    """
    if frames < 1:
        raise PlannerError(f"a video of {frames} frames has none. Give at least one frame.")
    merged = -(-frames // shape.temporal_patch_size)
    limits = shape.video_limits
    if shape.whole_video_limits:
        if min(width, height) < shape.token_pixels:
            raise PlannerError(
                f"a video of {width}x{height} is refused by the processor: each side needs at least "
                f"{shape.token_pixels} pixels."
            )
        counted = merged * shape.temporal_patch_size
        columns, rows = _resized(shape, width, height, *limits, counted_frames=counted, frames=frames)
    else:
        columns, rows = _resized(shape, width, height, *limits)
    return (columns * rows,) * merged


def audio_tokens(shape: ModelShape, seconds: float) -> int:
    """Token rows of a clip of that many seconds. Raises `PlannerError` for a model without audio."""
    if shape.audio is None:
        raise PlannerError(f"{shape.family} takes no audio, and one of the sizes is a clip of {seconds:g} s.")
    mel = round(seconds * MEL_FRAMES_PER_SECOND)
    if mel < 2:
        raise PlannerError(f"a clip of {seconds:g} s is too short; give at least 0.02 s.")
    if shape.audio.rows_per_chunk is None:
        return _halved_twice(mel)
    chunks, rest = divmod(mel, 100)
    for _ in range(3):
        rest = (rest - 1) // 2 + 1
    return rest + chunks * shape.audio.rows_per_chunk


def smallest_image_tokens(shape: ModelShape) -> int:
    """Token rows of the smallest image that the processor gives."""
    return max(1, -(-shape.image_limits.min_pixels // shape.token_pixels**2))


def largest_image_tokens(shape: ModelShape) -> int:
    """Token rows of the largest image that vLLM counts on: the most rows within the limit and the aspect ratio."""
    return _most_rows(shape, shape.image_limits.max_pixels)


def largest_item_tokens(shape: ModelShape, max_model_len: int) -> dict[str, int]:
    """Token rows of the largest item of each modality, as vLLM's budget counts them.

    Where limits bound single frames, a video's size depends on `max_model_len`, the longest sequence in tokens.
    """
    image = largest_image_tokens(shape)
    if shape.whole_video_limits:
        # As vLLM does: all pixels in the fewest frames.
        video = _most_rows(shape, shape.video_limits.max_pixels // shape.temporal_patch_size)
    else:
        # vLLM takes the limits of images here, and as many merged frames as fit into the longest sequence.
        fitting = shape.temporal_patch_size * (max_model_len // image)
        frames = max(1, min(fitting, _MAX_PROFILED_FRAMES))
        video = image * -(-frames // shape.temporal_patch_size)
    largest = {"image": image, "video": video}
    if shape.audio is not None:
        # vLLM uses the one formula of Qwen2-Audio for both omni families.
        largest["audio"] = _halved_twice(_PROFILED_AUDIO_SECONDS * MEL_FRAMES_PER_SECOND)
    return largest


def _halved_twice(mel: int) -> int:
    return ((mel - 1) // 2 + 1 - 2) // 2 + 1


def _most_rows(shape: ModelShape, max_pixels: int) -> int:
    for rows in range(max_pixels // shape.token_pixels**2, 0, -1):
        short = next(side for side in range(math.isqrt(rows), 0, -1) if rows % side == 0)
        if rows / short / short <= MAX_ASPECT_RATIO:
            return rows
    return 1


def _resized(
    shape: ModelShape,
    width: int,
    height: int,
    min_pixels: int,
    max_pixels: int,
    *,
    counted_frames: int = 1,
    frames: int = 1,
) -> tuple[int, int]:
    """Token columns and rows after resizing. `counted_frames` is `frames` filled up to whole merged frames.

    The processors compare with the filled-up number and scale by the other; both are kept, for equal results.
    """
    if min(width, height) < 1:
        raise PlannerError(f"a size of {width}x{height} has no pixels. Give at least 1x1.")
    if max(width, height) / min(width, height) > MAX_ASPECT_RATIO:
        raise PlannerError(
            f"a size of {width}x{height} is refused by the processor: the longer side is more than "
            f"{MAX_ASPECT_RATIO} times the shorter."
        )
    side = shape.token_pixels
    columns, rows = round(width / side), round(height / side)
    pixels = counted_frames * columns * rows * side**2
    if pixels > max_pixels:
        scale = math.sqrt((frames * height * width) / max_pixels)
        columns = max(1, math.floor(width / scale / side))
        rows = max(1, math.floor(height / scale / side))
    elif pixels < min_pixels:
        scale = math.sqrt(min_pixels / (frames * height * width))
        columns, rows = math.ceil(width * scale / side), math.ceil(height * scale / side)
    return columns, rows

"""Token counts against the real processors, and the largest items against vLLM's own functions."""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from published_configs import CHECKPOINTS, write_checkpoint

from vllm_neuron_cache.errors import PlannerError
from vllm_neuron_cache.planner.families import PixelLimits
from vllm_neuron_cache.planner.model import load_model_shape
from vllm_neuron_cache.planner.tokens import (
    audio_tokens,
    image_tokens,
    largest_image_tokens,
    largest_item_tokens,
    smallest_image_tokens,
    video_frame_tokens,
)

# Thumbnails, squares, screens, documents, panoramas of the extreme ratio, pictures larger than any limit.
SIZES = [
    (1, 1),
    (20, 20),
    (28, 28),
    (200, 1),
    (1, 200),
    (400, 2),
    (100, 56),
    (512, 512),
    (640, 480),
    (1024, 1024),
    (1001, 333),
    (1920, 1080),
    (2480, 3508),
    (2000, 10),
    (20, 2800),
    (4000, 20),
    (4096, 4096),
    (8192, 4096),
    (20000, 100),
    (16000, 12000),
]


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    return {name: load_model_shape(write_checkpoint(folder / name, name)) for name in CHECKPOINTS}


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers")


def image_processor(transformers, shape):
    return transformers.Qwen2VLImageProcessor(
        size={"shortest_edge": shape.image_limits.min_pixels, "longest_edge": shape.image_limits.max_pixels},
        patch_size=shape.patch_size,
        merge_size=shape.merge_size,
        temporal_patch_size=shape.temporal_patch_size,
    )


def video_processor(transformers, shape):
    cls = transformers.Qwen3VLVideoProcessor if shape.whole_video_limits else transformers.Qwen2VLVideoProcessor
    return cls(
        size={"shortest_edge": shape.video_limits.min_pixels, "longest_edge": shape.video_limits.max_pixels},
        patch_size=shape.patch_size,
        merge_size=shape.merge_size,
        temporal_patch_size=shape.temporal_patch_size,
        do_sample_frames=False,
    )


def real_image_tokens(processor, image, **kwargs):
    grid = processor(images=[image], return_tensors="np", **kwargs)["image_grid_thw"][0]
    return int(np.prod(grid)) // processor.merge_size**2


# Images ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Qwen2.5-VL-7B", "Qwen3-VL-32B"])
def test_photographs_give_the_rows_that_the_real_processor_gives(shapes, transformers, name):
    from vllm_neuron_cache.demo.media import PHOTOGRAPHS, load_photograph

    processor = image_processor(transformers, shapes[name])
    for photograph in PHOTOGRAPHS:
        image = load_photograph(photograph)
        assert image_tokens(shapes[name], *image.size) == real_image_tokens(processor, image), photograph


@pytest.mark.parametrize("name", ["Qwen2.5-VL-7B", "Qwen3-VL-32B"])
@pytest.mark.parametrize("size", [(1, 1), (7, 1400), (33, 31), (400, 2)])
def test_edge_cases_through_the_real_processor(shapes, transformers, name, size):
    width, height = size
    pixels = np.zeros((height, width, 3), dtype=np.uint8)
    processor = image_processor(transformers, shapes[name])
    # Named, because a picture of one pixel could be read either way.
    expected = real_image_tokens(processor, pixels, input_data_format="channels_last")
    assert image_tokens(shapes[name], width, height) == expected


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("size", SIZES)
def test_sizes_give_the_patches_that_the_processor_counts(shapes, transformers, name, size):
    width, height = size
    patches = image_processor(transformers, shapes[name]).get_number_of_image_patches(height, width, {})
    assert image_tokens(shapes[name], width, height) == patches // 4


@given(width=st.integers(1, 20000), height=st.integers(1, 20000), low=st.integers(1, 10**6), more=st.integers(0, 10**8))
def test_any_size_and_limits(shapes, width, height, low, more):
    pytest.importorskip("transformers")
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    shape = dataclasses.replace(shapes["Qwen3-VL-32B"], image_limits=PixelLimits(low, low + more))
    try:
        resized = smart_resize(height, width, factor=32, min_pixels=low, max_pixels=low + more)
    except ValueError:
        with pytest.raises(PlannerError, match="more than 200 times"):
            image_tokens(shape, width, height)
        return
    assert image_tokens(shape, width, height) == math.prod(resized) // 32**2


def test_the_figures_of_the_32b_model(shapes):
    shape = shapes["Qwen3-VL-32B"]
    assert image_tokens(shape, 512, 512) == 256
    # A merged frame is two sampled ones: 30 of them are 7,680 rows.
    assert sum(video_frame_tokens(shape, 512, 512, 60)) == 7680
    assert video_frame_tokens(shape, 512, 512, 30) == (256,) * 15


@pytest.mark.parametrize(
    ("width", "height", "words"),
    [(201, 1, "more than 200 times"), (1, 201, "more than 200 times"), (0, 5, "no pixels"), (5, 0, "no pixels")],
)
def test_what_the_processor_refuses(shapes, width, height, words):
    with pytest.raises(PlannerError, match=words):
        image_tokens(shapes["Qwen3-VL-32B"], width, height)


# Video -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("clip", [(1, 64, 48), (2, 320, 180), (5, 272, 640), (16, 128, 96)])
def test_clips_give_the_grid_of_the_real_processor(shapes, transformers, name, clip):
    frames, width, height = clip
    shape = shapes[name]
    video = np.zeros((frames, height, width, 3), dtype=np.uint8)
    grid = video_processor(transformers, shape)(videos=[video], return_tensors="np")["video_grid_thw"][0]
    merged, rows, columns = (int(side) for side in grid)
    assert video_frame_tokens(shape, width, height, frames) == (rows * columns // 4,) * merged


@given(frames=st.integers(1, 800), width=st.integers(32, 4000), height=st.integers(32, 4000))
def test_any_video(shapes, frames, width, height):
    pytest.importorskip("transformers")
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

    shape = shapes["Qwen3-VL-32B"]
    rows, columns = smart_resize(frames, height, width, 2, 32, *shape.video_limits)
    expected = (rows * columns // 32**2,) * -(-frames // 2)
    assert video_frame_tokens(shape, width, height, frames) == expected


def test_the_demo_clip(checkpoint, transformers):
    from vllm_neuron_cache.demo.media import load_clip

    clip = load_clip(16)
    shape = load_model_shape(checkpoint)
    grid = video_processor(transformers, shape)(videos=[clip.frames], return_tensors="np")["video_grid_thw"][0]
    frames, height, width = clip.frames.shape[:3]
    assert sum(video_frame_tokens(shape, width, height, frames)) == int(np.prod(grid)) // 4


def test_videos_that_the_processor_refuses(shapes):
    with pytest.raises(PlannerError, match="each side needs at least 32 pixels"):
        video_frame_tokens(shapes["Qwen3-VL-32B"], 640, 31, 4)
    with pytest.raises(PlannerError, match="0 frames"):
        video_frame_tokens(shapes["Qwen3-VL-32B"], 640, 480, 0)


# Audio -----------------------------------------------------------------------------------------------------------


@given(mel=st.integers(2, 30000))
def test_clips_of_audio_give_the_rows_of_the_omni_encoders(shapes, mel):
    pytest.importorskip("transformers")
    from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import _get_feat_extract_output_lengths

    assert audio_tokens(shapes["Qwen3-Omni-30B-A3B"], mel / 100) == _get_feat_extract_output_lengths(mel)
    # `Qwen2_5OmniProcessor.__call__`, transformers 5.14.1.
    assert audio_tokens(shapes["Qwen2.5-Omni-7B"], mel / 100) == ((mel - 1) // 2 + 1 - 2) // 2 + 1


def test_audio_figures_and_refusals(shapes):
    assert audio_tokens(shapes["Qwen2.5-Omni-7B"], 30) == 750
    assert audio_tokens(shapes["Qwen3-Omni-30B-A3B"], 30) == 390
    with pytest.raises(PlannerError, match="Qwen3-VL takes no audio"):
        audio_tokens(shapes["Qwen3-VL-32B"], 30)
    with pytest.raises(PlannerError, match="too short"):
        audio_tokens(shapes["Qwen2.5-Omni-7B"], 0.01)


# Limits ----------------------------------------------------------------------------------------------------------


@given(
    width=st.integers(32, 8000),
    height=st.integers(32, 8000),
    low=st.integers(1, 10**6),
    lower=st.integers(0, 10**6),
    high=st.integers(10**6, 10**7),
    higher=st.integers(0, 10**7),
)
def test_rows_grow_with_the_limits(shapes, width, height, low, lower, high, higher):
    """Sides below one token's are left out: there the processor itself gives fewer rows under a higher limit."""
    if max(width, height) > 200 * min(width, height):
        return

    def rows(*limits):
        return image_tokens(
            dataclasses.replace(shapes["Qwen3-VL-32B"], image_limits=PixelLimits(*limits)), width, height
        )

    assert rows(low, high) <= rows(low, high + higher)
    assert rows(max(1, low - lower), high) <= rows(low, high)


@given(width=st.integers(1, 20000), height=st.integers(1, 20000))
def test_no_image_is_smaller_than_the_smallest_or_larger_than_the_largest(shapes, width, height):
    if max(width, height) > 200 * min(width, height):
        return
    for shape in shapes.values():
        assert smallest_image_tokens(shape) <= image_tokens(shape, width, height)
        assert image_tokens(shape, width, height) * shape.token_pixels**2 <= shape.image_limits.max_pixels
        # What vLLM counts on is a little less where no two sides give the limit.
        assert largest_image_tokens(shape) * shape.token_pixels**2 <= shape.image_limits.max_pixels


def test_smallest_and_largest_images_exist(shapes):
    assert smallest_image_tokens(shapes["Qwen3-VL-32B"]) == 64 == image_tokens(shapes["Qwen3-VL-32B"], 10, 10)
    assert smallest_image_tokens(shapes["Qwen2.5-VL-7B"]) == 4 == image_tokens(shapes["Qwen2.5-VL-7B"], 10, 10)
    assert largest_image_tokens(shapes["Qwen3-VL-32B"]) == 16384 == image_tokens(shapes["Qwen3-VL-32B"], 9000, 9000)


@pytest.mark.vllm
@pytest.mark.parametrize("max_model_len", [None, 4096, 40000])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_largest_items_are_those_that_vllm_counts_on(shapes, transformers, name, max_model_len):
    """vLLM's own functions, given the processors that the shapes describe."""
    pytest.importorskip("vllm", reason="vLLM is not installed (extra 'cpu')")
    from vllm.model_executor.models.qwen2_5_omni_thinker import Qwen2_5OmniThinkerProcessingInfo
    from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLProcessingInfo
    from vllm.model_executor.models.qwen2_vl import Qwen2VLProcessingInfo
    from vllm.model_executor.models.qwen3_omni_moe_thinker import Qwen3OmniMoeThinkerProcessingInfo
    from vllm.model_executor.models.qwen3_vl import Qwen3VLProcessingInfo
    from vllm.model_executor.models.qwen3_vl_moe import Qwen3VLMoeProcessingInfo

    classes = {
        "Qwen2-VL": Qwen2VLProcessingInfo,
        "Qwen2.5-VL": Qwen2_5_VLProcessingInfo,
        "Qwen3-VL": Qwen3VLProcessingInfo,
        "Qwen3-VL MoE": Qwen3VLMoeProcessingInfo,
        "Qwen2.5-Omni": Qwen2_5OmniThinkerProcessingInfo,
        "Qwen3-Omni": Qwen3OmniMoeThinkerProcessingInfo,
    }
    shape = shapes[name]
    vision = SimpleNamespace(
        patch_size=shape.patch_size,
        spatial_merge_size=shape.merge_size,
        temporal_patch_size=shape.temporal_patch_size,
    )
    processor = SimpleNamespace(
        image_processor=image_processor(transformers, shape),
        video_processor=video_processor(transformers, shape),
        feature_extractor=transformers.WhisperFeatureExtractor(chunk_length=300),
    )

    class Info(classes[shape.family]):
        def get_hf_config(self):
            return SimpleNamespace(vision_config=vision)

        def get_hf_processor(self, **kwargs):
            return processor

    info = Info(SimpleNamespace(get_merged_mm_kwargs=lambda kwargs, modality=None: {}))
    length = max_model_len or shape.max_model_len
    modalities = ("image", "video", *(["audio"] if shape.audio else []))
    expected = info.get_mm_max_tokens_per_item(length, dict.fromkeys(modalities, 1))
    assert largest_item_tokens(shape, length) == expected

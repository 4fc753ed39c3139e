"""What is read from a model's files, and what is refused with which words."""

import copy
import dataclasses
import json
import subprocess
import sys

import pytest
from published_configs import CHECKPOINTS, QWEN3_VL_32B, write_checkpoint, write_files

from vllm_neuron_cache.errors import NeuronCacheError, PlannerError
from vllm_neuron_cache.planner.families import FAMILIES, FRAME_LIMITS, IMAGE_LIMITS, QWEN3_VIDEO_LIMITS
from vllm_neuron_cache.planner.model import load_model_shape

FAT_DIMS = {
    "Qwen2-VL-7B": 3584,
    "Qwen2.5-VL-7B": 3584,
    "Qwen3-VL-32B": 20480,
    "Qwen3-VL-30B-A3B": 8192,
    "Qwen2.5-Omni-7B": 3584,
    "Qwen3-Omni-30B-A3B": 8192,
}


def refusal(path, **kwargs):
    with pytest.raises(PlannerError) as caught:
        load_model_shape(path, **kwargs)
    return str(caught.value)


def changed(config, path, value):
    """`config` with the key at the dotted `path` set to `value`, or taken out where that is None."""
    config = copy.deepcopy(config)
    *parents, key = path.split(".")
    section = config
    for parent in parents:
        section = section[parent]
    if value is None:
        del section[key]
    else:
        section[key] = value
    return config


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_family_is_read(tmp_path, name):
    shape = load_model_shape(write_checkpoint(tmp_path, name))
    assert shape.fat_dim == FAT_DIMS[name]
    assert shape.dtype == "bfloat16" and shape.row_bytes == 2 * FAT_DIMS[name]
    assert shape.merge_factor == 4 and shape.temporal_patch_size == 2
    assert shape.notes == ()


def test_the_checkpoints_cover_the_families():
    assert {config["model_type"] for config, _ in CHECKPOINTS.values()} == {family.model_type for family in FAMILIES}


def test_the_32b_shape(tmp_path):
    shape = load_model_shape(write_checkpoint(tmp_path, "Qwen3-VL-32B"))
    assert (shape.patch_size, shape.hidden_size, shape.num_deepstack_levels) == (16, 5120, 3)
    assert shape.image_limits == (65536, 16777216) and shape.video_limits == (4096, 25165824)
    assert shape.whole_video_limits and shape.frames_apart and shape.audio is None
    assert shape.max_model_len == 262144


def test_a_file_is_as_good_as_its_folder(tmp_path):
    folder = write_checkpoint(tmp_path, "Qwen3-VL-32B")
    assert load_model_shape(folder / "config.json") == load_model_shape(folder)


def test_a_thinker_alone_is_read_like_the_whole_pipeline(tmp_path):
    whole = load_model_shape(write_checkpoint(tmp_path / "whole", "Qwen3-Omni-30B-A3B"))
    config, processors = CHECKPOINTS["Qwen3-Omni-30B-A3B"]
    thinker = config["thinker_config"] | {"dtype": "bfloat16"}
    alone = load_model_shape(write_files(tmp_path / "alone", {"config.json": thinker} | processors))
    assert alone == dataclasses.replace(whole, stage_keys=whole.stage_keys[:1])


def test_without_processor_files_the_limits_are_those_of_transformers_and_a_note_says_so(tmp_path):
    shape = load_model_shape(write_files(tmp_path, {"config.json": QWEN3_VL_32B}))
    assert shape.image_limits == IMAGE_LIMITS and shape.video_limits == QWEN3_VIDEO_LIMITS
    assert len(shape.notes) == 2 and "preprocessor_config.json" in shape.notes[0]


def test_the_defaults_are_those_of_the_installed_transformers():
    """Read in a process of its own: a processor that is called with other limits leaves them in its class."""
    pytest.importorskip("transformers")
    program = """
import json
from transformers import Qwen2VLImageProcessor, Qwen2VLVideoProcessor, Qwen3VLVideoProcessor
from transformers.models.qwen2_5_omni.processing_qwen2_5_omni import Qwen2_5OmniProcessorKwargs
from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import Qwen3OmniMoeProcessorKwargs
sizes = [processor.size for processor in (Qwen2VLImageProcessor, Qwen2VLVideoProcessor, Qwen3VLVideoProcessor)]
for defaults in (Qwen2_5OmniProcessorKwargs._defaults, Qwen3OmniMoeProcessorKwargs._defaults):
    sizes.append(defaults["videos_kwargs"]["size"])
print(json.dumps([[size["shortest_edge"], size["longest_edge"]] for size in sizes]))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    limits = [tuple(pair) for pair in json.loads(result.stdout.splitlines()[-1])]
    assert limits == [IMAGE_LIMITS, FRAME_LIMITS, QWEN3_VIDEO_LIMITS, FRAME_LIMITS, QWEN3_VIDEO_LIMITS]


def test_video_limits_come_from_the_image_file_where_there_is_no_other(tmp_path):
    assert load_model_shape(write_checkpoint(tmp_path, "Qwen2.5-VL-7B")).video_limits == (3136, 12845056)


def test_files_do_not_change_the_video_limits_of_an_omni_processor(tmp_path):
    assert load_model_shape(write_checkpoint(tmp_path, "Qwen2.5-Omni-7B")).video_limits == FRAME_LIMITS


def test_a_nested_processor_config_wins(tmp_path):
    nested = {
        "image_processor": {"size": {"shortest_edge": 1, "longest_edge": 2}},
        "video_processor": {"size": {"shortest_edge": 3, "longest_edge": 4}},
    }
    write_checkpoint(tmp_path, "Qwen3-VL-32B")
    shape = load_model_shape(write_files(tmp_path, {"processor_config.json": nested}))
    assert shape.image_limits == (1, 2) and shape.video_limits == (3, 4)


def test_a_processor_config_that_nests_nothing_is_passed_over(tmp_path):
    write_checkpoint(tmp_path, "Qwen3-VL-32B")
    shape = load_model_shape(write_files(tmp_path, {"processor_config.json": {"processor_class": "x"}}))
    assert shape.image_limits == (65536, 16777216)


def test_pixels_win_over_size(tmp_path):
    both = {"size": {"shortest_edge": 10, "longest_edge": 20}, "max_pixels": 30}
    write_checkpoint(tmp_path, "Qwen3-VL-32B")
    shape = load_model_shape(
        write_files(tmp_path, {"preprocessor_config.json": both, "video_preprocessor_config.json": both})
    )
    assert shape.image_limits == (10, 30)
    assert shape.video_limits == (10, 20), "Qwen3VLVideoProcessor reads `size` alone"


@pytest.mark.parametrize(
    ("config_dtype", "option", "dtype", "notes"),
    [
        ("bfloat16", "auto", "bfloat16", 0),
        ("float16", "auto", "float16", 0),
        ("float32", "auto", "bfloat16", 1),
        (None, "auto", "bfloat16", 1),
        ("float32", "float32", "float32", 0),
        ("float8", "bfloat16", "bfloat16", 0),
    ],
)
def test_dtypes(tmp_path, config_dtype, option, dtype, notes):
    write_checkpoint(tmp_path, "Qwen3-VL-32B")
    write_files(tmp_path, {"config.json": changed(QWEN3_VL_32B, "text_config.dtype", config_dtype)})
    shape = load_model_shape(tmp_path, dtype=option)
    assert shape.dtype == dtype and len(shape.notes) == notes


def test_stage_keys_are_those_of_an_omni_pipeline(tmp_path):
    shape = load_model_shape(write_checkpoint(tmp_path / "omni", "Qwen3-Omni-30B-A3B"))
    assert [tuple(key)[1:] for key in shape.stage_keys] == [(2048, "bfloat16"), (16, "int64")]
    assert load_model_shape(write_checkpoint(tmp_path / "vl", "Qwen3-VL-32B")).stage_keys == ()


def test_another_family_is_refused_with_the_list(tmp_path):
    message = refusal(write_files(tmp_path, {"config.json": {"model_type": "llava"}}))
    assert "'llava'" in message and str(tmp_path / "config.json") in message
    for family in FAMILIES:
        assert f"{family.name} ({family.model_type})" in message


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("model_type", None, "model_type is None"),
        ("vision_config", None, "vision_config is missing"),
        ("vision_config", 3, "vision_config is not an object"),
        ("vision_config.patch_size", None, "vision_config.patch_size is missing"),
        ("vision_config.patch_size", 0, "vision_config.patch_size is 0, and has to be a whole number of at least 1"),
        ("vision_config.patch_size", True, "vision_config.patch_size is True"),
        ("vision_config.spatial_merge_size", "2", "vision_config.spatial_merge_size is '2'"),
        ("vision_config.out_hidden_size", None, "vision_config.out_hidden_size is missing"),
        ("vision_config.deepstack_visual_indexes", 3, "deepstack_visual_indexes is 3, and has to be a list"),
        ("text_config.max_position_embeddings", None, "text_config.max_position_embeddings is missing"),
        ("text_config.hidden_size", 4096, "the two have to agree"),
        ("text_config.dtype", "float8", "text_config.dtype is 'float8'"),
    ],
)
def test_a_file_that_says_something_unusable_is_named_with_the_key(tmp_path, path, value, words):
    message = refusal(write_files(tmp_path, {"config.json": changed(QWEN3_VL_32B, path, value)}))
    assert words in message and str(tmp_path / "config.json") in message


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"size": {"shortest_edge": 1}}, "size.longest_edge is missing"),
        ({"size": [1, 2]}, "size is not an object"),
        ({"size": {"shortest_edge": 5, "longest_edge": 4}}, "the least number of pixels is 5 and the largest 4"),
        ({"patch_size": 14}, "patch_size is 14, and config.json has 16 in vision_config.patch_size"),
        ({"merge_size": 4}, "merge_size is 4"),
    ],
)
def test_a_processor_file_that_does_not_fit_is_named(tmp_path, values, words):
    write_checkpoint(tmp_path, "Qwen3-VL-32B")
    message = refusal(write_files(tmp_path, {"preprocessor_config.json": values}))
    assert words in message and str(tmp_path / "preprocessor_config.json") in message


def test_files_that_cannot_be_read(tmp_path):
    assert "No such file" in refusal(tmp_path / "nowhere") and "nothing is downloaded" in refusal(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{")
    assert "is not JSON" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert "the file is not an object" in refusal(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    assert "is not JSON" in refusal(tmp_path)


def test_a_dtype_that_is_none_of_vllms_is_refused(tmp_path):
    assert "dtype is 'int8'" in refusal(write_checkpoint(tmp_path, "Qwen3-VL-32B"), dtype="int8")


def test_the_error_is_of_this_package_and_a_value_error():
    assert issubclass(PlannerError, NeuronCacheError) and issubclass(PlannerError, ValueError)


def test_the_demo_checkpoint(checkpoint):
    shape = load_model_shape(checkpoint)
    assert shape.fat_dim == 512 and shape.family == "Qwen3-VL"
    assert len(shape.notes) == 1, "float32"

"""Shapes of published checkpoints: the keys of their config.json and processor files that the planner reads.

The repositories named below, at huggingface.co, publish them; all other keys are left out. The values of Qwen3-VL-32B
and Qwen3-Omni were compared with copies in public source repositories, those of the others were not: a deployer's own
config.json is what counts.
"""

import json
from pathlib import Path

# Qwen/Qwen2-VL-7B-Instruct: before transformers 5, the language model's keys lie at the top.
QWEN2_VL_7B = {
    "model_type": "qwen2_vl",
    "torch_dtype": "bfloat16",
    "hidden_size": 3584,
    "max_position_embeddings": 32768,
    "vision_config": {
        "depth": 32,
        "embed_dim": 1280,
        "hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}

# Qwen/Qwen2.5-VL-7B-Instruct
QWEN2_5_VL_7B = {
    "model_type": "qwen2_5_vl",
    "torch_dtype": "bfloat16",
    "hidden_size": 3584,
    "max_position_embeddings": 128000,
    "vision_config": {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 3584,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}


def _qwen3_vision(out_hidden_size: int) -> dict:
    return {
        "depth": 27,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "in_channels": 3,
        "out_hidden_size": out_hidden_size,
        "deepstack_visual_indexes": [8, 16, 24],
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }


# Qwen/Qwen3-VL-32B-Instruct
QWEN3_VL_32B = {
    "model_type": "qwen3_vl",
    "text_config": {"dtype": "bfloat16", "hidden_size": 5120, "max_position_embeddings": 262144},
    "vision_config": _qwen3_vision(5120),
}

# Qwen/Qwen3-VL-30B-A3B-Instruct
QWEN3_VL_30B_A3B = {
    "model_type": "qwen3_vl_moe",
    "text_config": {"dtype": "bfloat16", "hidden_size": 2048, "max_position_embeddings": 262144},
    "vision_config": _qwen3_vision(2048),
}

# Qwen/Qwen2.5-Omni-7B
QWEN2_5_OMNI_7B = {
    "model_type": "qwen2_5_omni",
    "torch_dtype": "bfloat16",
    "thinker_config": {
        "model_type": "qwen2_5_omni_thinker",
        "text_config": {"hidden_size": 3584, "max_position_embeddings": 32768},
        "vision_config": {
            "depth": 32,
            "embed_dim": 1280,
            "hidden_act": "silu",
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": 3584,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        "audio_config": {
            "activation_function": "gelu",
            "d_model": 1280,
            "encoder_attention_heads": 20,
            "encoder_ffn_dim": 5120,
            "encoder_layers": 32,
            "max_source_positions": 1500,
            "n_window": 100,
            "num_mel_bins": 128,
            "output_dim": 3584,
        },
    },
    "talker_config": {"model_type": "qwen2_5_omni_talker"},
}

# Qwen/Qwen3-Omni-30B-A3B-Instruct
QWEN3_OMNI_30B_A3B = {
    "model_type": "qwen3_omni_moe",
    "dtype": "bfloat16",
    "thinker_config": {
        "model_type": "qwen3_omni_moe_thinker",
        "text_config": {"hidden_size": 2048, "max_position_embeddings": 65536},
        "vision_config": _qwen3_vision(2048),
    },
    "talker_config": {"model_type": "qwen3_omni_moe_talker", "num_code_groups": 16},
}

QWEN2_IMAGES = {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
QWEN3_IMAGES = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
}
QWEN3_VIDEOS = QWEN3_IMAGES | {"size": {"longest_edge": 25165824, "shortest_edge": 4096}}

CHECKPOINTS = {
    "Qwen2-VL-7B": (QWEN2_VL_7B, {"preprocessor_config.json": QWEN2_IMAGES}),
    "Qwen2.5-VL-7B": (QWEN2_5_VL_7B, {"preprocessor_config.json": QWEN2_IMAGES}),
    "Qwen3-VL-32B": (
        QWEN3_VL_32B,
        {"preprocessor_config.json": QWEN3_IMAGES, "video_preprocessor_config.json": QWEN3_VIDEOS},
    ),
    "Qwen3-VL-30B-A3B": (
        QWEN3_VL_30B_A3B,
        {"preprocessor_config.json": QWEN3_IMAGES, "video_preprocessor_config.json": QWEN3_VIDEOS},
    ),
    "Qwen2.5-Omni-7B": (QWEN2_5_OMNI_7B, {"preprocessor_config.json": QWEN2_IMAGES}),
    "Qwen3-Omni-30B-A3B": (
        QWEN3_OMNI_30B_A3B,
        {"preprocessor_config.json": QWEN2_IMAGES | {"patch_size": 16}},
    ),
}


def write_checkpoint(folder: Path, name: str) -> Path:
    """A folder with the configuration files of one of `CHECKPOINTS`."""
    config, processors = CHECKPOINTS[name]
    return write_files(folder, {"config.json": config} | processors)


def write_files(folder: Path, files: dict[str, dict]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, values in files.items():
        (folder / name).write_text(json.dumps(values))
    return folder

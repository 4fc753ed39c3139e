"""Qwen2.5-VL's static encoder against the tower of vLLM, on photographs and a clip; and its windows, one by one."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed (extra 'cpu')")

import torch
from towers import ATTENTION_BLOCK, LANES, check_rules, encode, error, errors, require_lane, rounded_to
from transformers import Qwen2VLImageProcessor, Qwen2VLVideoProcessor
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniVisionEncoderConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniVisionEncoder
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VisionTransformer
from vllm.model_executor.models.vision import FusedInputNorm
from vllm.utils.torch_utils import set_default_torch_dtype

from vllm_neuron_cache.demo.media import load_clip, load_photograph
from vllm_neuron_cache.demo.recipe import randomise
from vllm_neuron_cache.encoder_cache.packing import Bucket
from vllm_neuron_cache.encoders.interface import EncoderItem
from vllm_neuron_cache.encoders.qwen2_5_vl import Qwen2_5VLEncoder
from vllm_neuron_cache.encoders.static_encoder import encoder_ladder

pytestmark = pytest.mark.vllm

BOUND = 1e-4
BUCKET = Bucket(ATTENTION_BLOCK, 4)
CONFIG = Qwen2_5OmniVisionEncoderConfig(
    depth=3,
    hidden_size=96,
    intermediate_size=200,
    num_heads=3,
    patch_size=14,
    spatial_merge_size=2,
    temporal_patch_size=2,
    window_size=112,
    fullatt_block_indexes=[1],
    in_channels=3,
    out_hidden_size=72,
)
# Height and width: merged cells that fill their windows, that do not, less than one window, strips.
SIZES = {
    "astronaut": (224, 168),
    "chelsea": (196, 252),
    "coffee": (84, 56),
    "rocket": (28, 560),
    "hubble": (252, 196),
}


def image_data(**options) -> dict[str, dict[str, torch.Tensor]]:
    """The photographs as vLLM's items of Qwen's processor."""
    processor = Qwen2VLImageProcessor(patch_size=14, merge_size=2, do_resize=False, **options)
    data = {}
    for name, (height, width) in SIZES.items():
        made = processor(load_photograph(name).resize((width, height)), return_tensors="pt")
        data[name] = {"pixel_values": made["pixel_values"], "image_grid_thw": made["image_grid_thw"][0]}
    return data


def video_data() -> dict[str, torch.Tensor]:
    import cv2

    frames = np.stack([cv2.resize(frame, (112, 140)) for frame in load_clip(6).frames])
    processor = Qwen2VLVideoProcessor(patch_size=14, merge_size=2, do_resize=False, do_sample_frames=False)
    made = processor(torch.from_numpy(frames).permute(0, 3, 1, 2), return_tensors="pt")
    return {"pixel_values_videos": made["pixel_values_videos"], "video_grid_thw": made["video_grid_thw"][0]}


@pytest.fixture(scope="module")
def data():
    return {"clip": video_data(), **image_data()}


def pixels_and_grid(data: dict[str, torch.Tensor]) -> tuple[torch.Tensor, list[list[int]]]:
    (pixels, grid) = data.values()
    return pixels, [grid.tolist()]


@contextmanager
def one_rank(path) -> Iterator[None]:
    """What vLLM's layers ask for when they are made."""
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, f"file://{path}", 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)
        yield
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


def reference_of(dtype: torch.dtype) -> Qwen2_5OmniVisionEncoder:
    """transformers' own, in float64, with weights that `dtype` holds."""
    torch.manual_seed(0)
    reference = Qwen2_5OmniVisionEncoder(CONFIG).eval()
    randomise(reference)
    return rounded_to(reference, dtype).double()


@pytest.fixture(scope="module")
def tower_of(tmp_path_factory):
    """From a dtype to vLLM's tower, with the weights of the reference, packed as its loader leaves them."""
    towers = {}

    def build(dtype: torch.dtype) -> Qwen2_5_VisionTransformer:
        if dtype not in towers:
            with set_default_torch_dtype(dtype):
                towers[dtype] = Qwen2_5_VisionTransformer(CONFIG).eval()
            towers[dtype].load_weights(reference_of(dtype).state_dict().items())
            for layer in towers[dtype].modules():
                if hasattr(layer, "quant_method"):
                    layer.quant_method.process_weights_after_loading(layer)
        return towers[dtype]

    with one_rank(tmp_path_factory.mktemp("ranks") / "rendezvous"):
        yield build


def adapter_of(tower: Qwen2_5_VisionTransformer) -> Qwen2_5VLEncoder:
    return Qwen2_5VLEncoder(CONFIG, dtype=tower.dtype, tower=tower)


@pytest.fixture
def adapter(tower_of):
    return adapter_of(tower_of(torch.float32))


def items_of(adapter: Qwen2_5VLEncoder, data: dict[str, dict]) -> dict[str, EncoderItem]:
    return {name: adapter.item("video" if name == "clip" else "image", one) for name, one in data.items()}


def stock_rows(tower: torch.nn.Module, data: dict[str, dict]) -> dict[str, torch.Tensor]:
    with torch.inference_mode():
        return {name: tower(*pixels_and_grid(one)) for name, one in data.items()}


@pytest.fixture(scope="module")
def stock(tower_of, data):
    return stock_rows(tower_of(torch.float32), data)


# Rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lane", "call_layers"), LANES)
def test_rows_are_those_of_the_tower(adapter, data, stock, lane, call_layers):
    require_lane(lane)
    bucket = None if lane == "eager" else Bucket(ATTENTION_BLOCK, 2)
    rows = encode(adapter, items_of(adapter, data), lane=lane, call_layers=call_layers, bucket=bucket)
    assert max(errors(rows, stock).values()) < BOUND


@pytest.mark.parametrize(
    ("dtype", "call_layers"), [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float16, False)]
)
def test_rounding_is_not_worse_than_the_towers(tower_of, data, dtype, call_layers):
    adapter, reference = adapter_of(tower_of(dtype)), reference_of(dtype)
    rounded = {
        name: {key: one.to(dtype) if one.is_floating_point() else one for key, one in item.items()}
        for name, item in data.items()
    }
    with torch.inference_mode():
        exact = {}
        for name, item in rounded.items():
            pixels, grid = pixels_and_grid(item)
            exact[name] = reference(pixels.double(), torch.tensor(grid)).pooler_output
    own = errors(encode(adapter, items_of(adapter, rounded), call_layers=call_layers, bucket=BUCKET), exact)
    stock = errors(stock_rows(adapter.tower, rounded), exact)
    assert {name: own[name] / stock[name] for name in own if own[name] > 1.5 * stock[name]} == {}


def test_pixels_that_the_tower_scales_are_scaled(adapter, stock):
    """vLLM's default for Qwen2.5-VL."""
    data = {"astronaut": image_data(do_rescale=False, do_normalize=False)["astronaut"]}
    pixels = data["astronaut"]["pixel_values"]
    assert pixels.max() > 100
    processor = Qwen2VLImageProcessor()
    norm, adapter.tower.input_norm = (
        adapter.tower.input_norm,
        FusedInputNorm(processor.image_mean, processor.image_std, processor.rescale_factor),
    )
    try:
        for kind in (torch.float32, torch.uint8):
            data["astronaut"]["pixel_values"] = pixels.to(kind)
            exact = stock_rows(adapter.tower, data)
            assert max(errors(encode(adapter, items_of(adapter, data), bucket=BUCKET), exact).values()) < BOUND
    finally:
        adapter.tower.input_norm = norm
    assert error(exact["astronaut"], stock["astronaut"]) < BOUND


def test_activations_that_leave_float16_are_clamped_as_in_the_tower(tower_of, data, monkeypatch):
    tower = tower_of(torch.float16)
    adapter, picture, last = adapter_of(tower), {"coffee": data["coffee"]}, []
    for layer in (tower.blocks[-1].attn.proj, tower.blocks[-1].mlp.down_proj):
        large = layer.bias.detach().clone()
        large[0] = 60000
        monkeypatch.setattr(layer, "bias", torch.nn.Parameter(large))
    monkeypatch.setattr(tower.blocks[-1], "forward", follow(tower.blocks[-1].forward, last))
    exact = stock_rows(tower, picture)
    assert torch.isinf(last[0]).any()
    rows = encode(adapter, items_of(adapter, picture), bucket=BUCKET)
    assert error(rows["coffee"], exact["coffee"]) < 0.01


def follow(function, results: list):
    def following(*args, **kwargs):
        results.append(function(*args, **kwargs))
        return results[-1]

    return following


# What must show --------------------------------------------------------------------------------------------------


def with_windows(items: dict[str, EncoderItem], change) -> dict[str, EncoderItem]:
    def changed(item: EncoderItem) -> EncoderItem:
        def inputs(segment: int):
            patches, window_ids, *tables = item.inputs(segment)
            return patches, change(window_ids), *tables

        return item._replace(inputs=inputs)

    return {name: changed(item) for name, item in items.items()}


@pytest.mark.parametrize("change", [torch.zeros_like, lambda ids: ids.roll(4)], ids=["no windows", "moved by a cell"])
def test_control_other_windows_show(adapter, data, stock, change):
    wrong = errors(encode(adapter, with_windows(items_of(adapter, data), change), bucket=BUCKET), stock)
    # All of one window, or of one cell in each row of windows: nothing else is to be seen there.
    assert min(wrong[name] for name in ("clip", "astronaut", "chelsea", "hubble")) > 100 * BOUND


def test_control_without_segments_neighbours_leak_into_each_other(adapter, data, stock, monkeypatch):
    forward = adapter.forward
    monkeypatch.setattr(adapter, "forward", lambda inputs, ids, weights: forward(inputs, ids * 0, weights))
    wrong = errors(encode(adapter, items_of(adapter, data), bucket=BUCKET), stock)
    assert max(wrong.values()) > 100 * BOUND


def test_control_frames_of_a_clip_that_are_one_segment_show(adapter, data, stock):
    item = items_of(adapter, data)["clip"]

    def inputs(segment: int):
        return tuple(torch.cat(tables) for tables in zip(*map(item.inputs, range(len(item.segments)))))

    rows = encode(adapter, {"clip": EncoderItem((sum(item.segments),), inputs)}, bucket=BUCKET)
    assert error(rows["clip"], stock["clip"]) > 100 * BOUND


# Windows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("window_size", "patch_size", "merge_size"), [(112, 14, 2), (64, 8, 2), (126, 14, 3)])
def test_windows_are_those_of_the_tower(window_size, patch_size, merge_size):
    sizes = {"window_size": window_size, "patch_size": patch_size, "spatial_merge_size": merge_size}
    adapter = Qwen2_5VLEncoder(SimpleNamespace(**(CONFIG.to_dict() | sizes)), dtype=torch.float32)
    tower = SimpleNamespace(**sizes, spatial_merge_unit=merge_size**2)
    for rows in (*range(1, 11), 19):
        for columns in (*range(1, 10), 33):
            for frames in (1, 3):
                height, width = rows * merge_size, columns * merge_size
                index, ends = Qwen2_5_VisionTransformer.get_window_index_thw(tower, frames, height, width)
                lengths = torch.diff(ends, prepend=torch.zeros(1, dtype=torch.int32)) // merge_size**2
                cells = torch.empty(len(index), dtype=torch.int64)
                cells[index] = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
                # The tower counts on from frame to frame, and these begin anew.
                expected = (cells.view(frames, -1) % (len(lengths) // frames)).repeat_interleave(merge_size**2, dim=1)
                own = adapter.window_ids(height, width)
                assert own.dtype is torch.int32
                assert all(torch.equal(own.long(), frame) for frame in expected), (frames, height, width)


# Without a model -------------------------------------------------------------------------------------------------


def test_weights_are_those_of_the_tower(tower_of):
    with set_default_torch_dtype(torch.float32):
        parameters = dict(Qwen2_5_VisionTransformer(CONFIG).named_parameters())
    shapes = Qwen2_5VLEncoder(CONFIG, dtype=torch.float32).weight_shapes
    flat = parameters["patch_embed.proj.weight"].flatten(1).shape
    assert shapes == {name: tuple(tensor.shape) for name, tensor in parameters.items()} | {
        "patch_embed.proj.weight": tuple(flat)
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_obey_the_rules_in_every_bucket(dtype):
    adapter = Qwen2_5VLEncoder(CONFIG, dtype=dtype)
    check_rules(adapter, encoder_ladder(adapter, ATTENTION_BLOCK))


def test_item_of_embeddings_is_none(adapter):
    assert adapter.item("image", {"image_embeds": torch.zeros(4, 72), "image_grid_thw": torch.ones(3)}) is None

"""Qwen3-VL's encoder as a static graph: it makes what the model's own makes, and obeys every rule."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small_encoder import Rank

from vllm_neuron_cache.encoder_cache.packing import Bucket, pack
from vllm_neuron_cache.encoders import qwen3_vl, static_encoder
from vllm_neuron_cache.encoders.interface import EncoderItem
from vllm_neuron_cache.encoders.qwen3_vl import Qwen3VLEncoder
from vllm_neuron_cache.encoders.weights import ModelWeights, plain_form
from vllm_neuron_cache.errors import ConfigurationError, GraphRuleError
from vllm_neuron_cache.graphs.check import check_spec
from vllm_neuron_cache.graphs.lanes import make_lane
from vllm_neuron_cache.graphs.lanes.inductor import compiler_available
from vllm_neuron_cache.graphs.spec import BufferShape
from vllm_neuron_cache.graphs.vision_encoder import encoder_spec

needs_compiler = pytest.mark.skipif(not compiler_available(), reason="inductor needs a C++ compiler, and there is none")

ATTENTION_BLOCK = 1280
"""Two frames of the clip fit, and each of the photographs."""
PHOTOGRAPHS = ("astronaut", "chelsea", "coffee", "rocket")
SMALLER = {"coffee": (300, 200), "rocket": (160, 107)}
"""Small enough to share a block."""


@pytest.fixture(autouse=True)
def inference_mode():
    """That of vLLM's steps."""
    with torch.inference_mode():
        yield


# Against the model that vLLM loaded ----------------------------------------------------------------------------


class Loaded:
    """The tower that vLLM loaded, and photographs and a clip as its processor hands them to the model runner."""

    def __init__(self, checkpoint: Path, dtype: str) -> None:
        sys.path.insert(0, str(Path(__file__).parents[1] / "integrations" / "vllm"))
        from engines import start

        from vllm_neuron_cache.demo.media import load_clip, load_photograph
        from vllm_neuron_cache.demo.requests import Media, MediaRequest, engine_prompt

        self.engine = start(checkpoint, None, dtype=dtype, limit_mm_per_prompt={"image": 4, "video": 1})
        runner = self.engine.runner
        self.tower = runner.model.visual
        self.config = runner.model.config.vision_config
        self.dtype = runner.dtype
        self.data: dict[str, tuple[str, dict[str, torch.Tensor]]] = {}
        batch = runner._batch_mm_inputs_from_scheduler

        def capturing(scheduler_output: Any) -> Any:
            hashes, items, refs = batch(scheduler_output)
            for key, (modality, item) in zip(hashes, items):
                self.data[key] = modality, {name: element.data for name, element in item.items()}
            return hashes, items, refs

        runner._batch_mm_inputs_from_scheduler = capturing
        images = {name: load_photograph(name) for name in PHOTOGRAPHS}
        images |= {name: images[name].resize(size) for name, size in SMALLER.items()}
        media = Media(images=images, clip=load_clip(8).vllm_input)
        self.engine.generate([engine_prompt(MediaRequest(images=PHOTOGRAPHS, clip=True), media)], max_tokens=1)
        assert len(self.data) == len(PHOTOGRAPHS) + 1

    def adapter(self) -> Qwen3VLEncoder:
        adapter = Qwen3VLEncoder(self.config, dtype=self.dtype, tower=self.tower)
        adapter.block_positions = lambda attention_block: (attention_block // 2, attention_block)  # fewer to trace
        return adapter

    def rank(self, **arguments: Any) -> Rank:
        return Rank(adapter=self.adapter(), attention_block=ATTENTION_BLOCK, block_size=64, num_blocks=61, **arguments)

    def items(self, adapter: Qwen3VLEncoder) -> dict[str, EncoderItem]:
        return {key: adapter.item(modality, data) for key, (modality, data) in self.data.items()}

    def pixels(self, key: str) -> tuple[torch.Tensor, list[list[int]]]:
        modality, data = self.data[key]
        grid = data["image_grid_thw" if modality == "image" else "video_grid_thw"]
        return data["pixel_values" if modality == "image" else "pixel_values_videos"], [grid.flatten().tolist()]

    def stock(self) -> dict[str, torch.Tensor]:
        """What the model's own encoder makes of each item."""
        return {key: self.tower(*self.pixels(key)) for key in self.data}

    @property
    def clip(self) -> str:
        (key,) = (key for key, (modality, _) in self.data.items() if modality == "video")
        return key


@pytest.fixture(scope="module")
def loaded(checkpoint):
    with torch.inference_mode():
        loaded = Loaded(checkpoint, "float32")
    yield loaded
    loaded.engine.close()


@pytest.fixture(scope="module")
def loaded_bfloat16(checkpoint):
    with torch.inference_mode():
        loaded = Loaded(checkpoint, "bfloat16")
    yield loaded
    loaded.engine.close()


@pytest.fixture(scope="module")
def checkpoint_weights(checkpoint):
    """By path in the tower, as they are in the checkpoint's file."""
    from safetensors.torch import load_file

    prefix = "model.visual."
    tensors = {}
    for file in checkpoint.glob("*.safetensors"):
        tensors |= {name.removeprefix(prefix): t for name, t in load_file(file).items() if name.startswith(prefix)}
    return tensors


def relative_error(rows: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """That of the worst item."""
    return max(
        ((rows[key].double() - expected[key].double()).norm() / expected[key].double().norm()).item()
        for key in expected
    )


def encoded(rank: Rank, items: dict[str, EncoderItem]) -> dict[str, torch.Tensor]:
    rank.reserve_for(items)
    assert rank.encoder.encode(items) == {}
    rank.blocks.check_integrity()
    return {key: rank.rows(key) for key in items}


@pytest.mark.vllm
@pytest.mark.parametrize("call_layers", [True, False], ids=["layers", "weights"])
def test_photographs_and_a_clip_are_encoded_as_by_the_model(loaded, call_layers):
    rank = loaded.rank(call_layers=call_layers)
    items = loaded.items(rank.adapter)
    assert sorted(len(item.segments) for item in items.values()) == [1, 1, 1, 1, 4]
    rows = encoded(rank, items)
    assert relative_error(rows, loaded.stock()) <= 1e-4
    # Several segments shared a block.
    launches = pack([item.segments for item in items.values()], rank.encoder.ladder)
    assert any(placement.first for launch in launches for placement in launch.placements)


@pytest.mark.vllm
@needs_compiler
@pytest.mark.parametrize("call_layers", [True, False], ids=["layers", "weights"])
def test_compiled_it_makes_the_same(loaded, call_layers):
    rank = loaded.rank(call_layers=call_layers, warm=False)
    stock = loaded.stock()
    keys = sorted(stock, key=lambda key: len(stock[key]))[:2]  # the two smallest photographs
    items = {key: loaded.items(rank.adapter)[key] for key in keys}
    rank.encoder.ladder = rank.encoder.ladder._replace(buckets=(Bucket(ATTENTION_BLOCK, 1),))
    (launch,) = pack([item.segments for item in items.values()], rank.encoder.ladder)
    rank.writer.warm_up()
    rank.reserve_for(items)
    args = rank.encoder._args(launch, [rank.encoder._open(key, item) for key, item in items.items()])
    spec = rank.encoder._graphs[launch.bucket.positions].spec
    (flags,) = make_lane("inductor").lower(spec, launch.bucket.num_blocks, args)(*args)
    assert flags.all()
    assert relative_error({key: rank.rows(key) for key in keys}, {key: stock[key] for key in keys}) <= 1e-4


@pytest.mark.vllm
def test_in_bfloat16_it_is_as_exact_as_the_model(loaded_bfloat16, checkpoint_weights):
    """Against both there is the same computation in float64, from the same rounded weights and inputs."""
    loaded = loaded_bfloat16
    exact = Qwen3VLEncoder(loaded.config, dtype=torch.float64, tower=loaded.tower)
    weights = plain_form(exact.weight_shapes, torch.float64).bind(
        [
            checkpoint_weights[name].to(torch.bfloat16).double().reshape(shape)
            for name, shape in exact.weight_shapes.items()
        ]
    )
    reference = {}
    for key, item in loaded.items(exact).items():
        rows = []
        for segment, length in enumerate(item.segments):
            inputs = [
                tensor.to(torch.bfloat16) if number == 0 else tensor
                for number, tensor in enumerate(item.inputs(segment))
            ]
            batched = tuple(tensor.double()[None] for tensor in inputs)
            rows.append(exact.forward(batched, torch.zeros(1, length, dtype=torch.int32), weights)[0])
        reference[key] = torch.cat(rows)
    stock = relative_error(loaded.stock(), reference)
    assert 1e-4 < stock < 0.1
    for call_layers in (True, False):
        rank = loaded.rank(call_layers=call_layers)
        ours = relative_error(encoded(rank, loaded.items(rank.adapter)), reference)
        assert ours <= 1.5 * stock, (call_layers, ours, stock)


def no_mask(loaded, rank, patch):
    patch.setattr(
        qwen3_vl, "segment_mask", lambda segment_ids, dtype: torch.zeros_like(segment_ids, dtype=dtype)[:, None, None]
    )


def one_segment_for_all_frames(loaded, rank, patch):
    item = rank.adapter.item

    def merged(modality, data):
        frames = item(modality, data)
        if modality == "image":
            return frames
        halves = [range(len(frames.segments))[:2], range(len(frames.segments))[2:]]
        return EncoderItem(
            tuple(sum(frames.segments[frame] for frame in half) for half in halves),
            lambda segment: tuple(map(torch.cat, zip(*(frames.inputs(frame) for frame in halves[segment])))),
        )

    patch.setattr(rank.adapter, "item", merged)


def raster_order(*numbers: int):
    def control(loaded, rank, patch):
        tables = rank.adapter._frame_tables

        def in_raster_order(height, width):
            merge = torch.arange(height * width).view(height // 2, 2, width // 2, 2).transpose(1, 2).flatten()
            return tuple(
                torch.empty_like(table).index_copy_(0, merge, table) if number in numbers else table
                for number, table in enumerate(tables(height, width))
            )

        rank.adapter._items = qwen3_vl.VisionItems(in_raster_order)

    return control


def zeroed_deepstack_merger(loaded, rank, patch):
    names = [info.name for info in rank.weights.form.weights]
    tensors = list(rank.weights.tensors)
    for kind in ("weight", "bias"):
        number = names.index(f"deepstack_merger_list.1.linear_fc2.{kind}")
        tensors[number] = torch.zeros_like(tensors[number])
    rank.weights._tensors = tuple(tensors)


@pytest.mark.parametrize(("height", "width"), [(2, 2), (4, 2), (16, 16), (24, 20), (38, 64)])
def test_tables_made_on_the_host_are_those_of_the_tower(loaded, height, width):
    tower, grid = loaded.tower, [[1, height, width]]
    adapter = Qwen3VLEncoder(loaded.config, dtype=torch.float32, tower=tower)
    positions, cos, sin = adapter._frame_tables(height, width)
    torch.testing.assert_close(positions, tower.fast_pos_embed_interpolate(grid), rtol=1e-5, atol=1e-6)
    right_cos, right_sin = tower.rot_pos_emb(grid)
    assert torch.equal(cos, right_cos) and torch.equal(sin, right_sin)


class FusedMMInputNorm(torch.nn.Module):
    """As vLLM 0.32's, by name and contents."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = torch.tensor([2.0, 3.0, 5.0]), torch.tensor([0.0, 1.0, -1.0])


def test_pixels_that_the_tower_scales_are_scaled():
    adapter = small_adapter()
    pixels = torch.arange(4 * adapter.inputs[0].width).view(4, -1).to(torch.uint8)
    fields = {"pixel_values": pixels, "image_grid_thw": torch.tensor([1, 2, 2])}
    adapter.tower.input_norm = norm = FusedMMInputNorm()
    patches = adapter.item("image", fields).inputs(0)[0]
    by_channel = pixels.float().view(4, 3, -1)
    assert torch.equal(patches, (by_channel * norm.weight[:, None] + norm.bias[:, None]).view(4, -1))
    tower = adapter.tower
    tower.input_norm = torch.nn.Identity()  # of no known kind
    with pytest.raises(ConfigurationError, match=r"prepares pixels by Identity.*compiled_encoder to false"):
        Qwen3VLEncoder(SMALL, dtype=torch.float32, tower=tower)


CONTROLS = {
    "no mask": no_mask,
    "frames as one segment": one_segment_for_all_frames,
    "position embeddings in raster order": raster_order(0),
    "rotary tables in raster order": raster_order(1, 2),
    "a deepstack merger of zeros": zeroed_deepstack_merger,
}


@pytest.mark.vllm
@pytest.mark.parametrize("control", CONTROLS.values(), ids=CONTROLS)
def test_control_a_wrong_encoder_is_not_within_the_bound(loaded, control, monkeypatch):
    rank = loaded.rank(warm=False)
    control(loaded, rank, monkeypatch)
    rank.writer.warm_up()
    rank.encoder.warm_up()
    stock = loaded.stock()
    assert relative_error(encoded(rank, loaded.items(rank.adapter)), stock) > 1e-3


@pytest.mark.vllm
@pytest.mark.parametrize("call_layers", [True, False], ids=["layers", "weights"])
def test_weights_are_those_of_the_checkpoint_and_none_is_a_copy_of_what_the_model_has(
    loaded, checkpoint_weights, call_layers
):
    adapter = loaded.adapter()
    weights = ModelWeights(loaded.tower, adapter.weight_shapes, torch.float32, call_layers=call_layers)
    parameters = {name: tensor for name, tensor in loaded.tower.named_parameters() if tensor.numel()}
    copied = 0
    for info, tensor in zip(weights.form.weights, weights.tensors, strict=True):
        if info.name.endswith(".layer"):
            assert call_layers and tensor.dtype is torch.int32
            continue
        assert torch.equal(tensor, checkpoint_weights[info.name].reshape(info.shape)), info.name
        if info.name in parameters:
            assert tensor.data_ptr() == parameters[info.name].data_ptr(), info.name
        else:
            copied += 1
    # vLLM has packed its linear layers, and left nothing of their weights.
    layers = {name.removesuffix(".weight") for name in checkpoint_weights if name.endswith("weight")}
    packed = {layer for layer in layers if f"{layer}.weight" not in parameters}
    assert copied == (0 if call_layers else len(packed)) and packed
    if not call_layers:
        assert {info.name for info in weights.form.weights} == checkpoint_weights.keys() - {"pos_embed.weight"}
    assert weights.tensors is weights.tensors


@pytest.mark.vllm
def test_embeddings_instead_of_pixels_are_no_item(loaded):
    assert (
        loaded.adapter().item("image", {"image_embeds": torch.zeros(4, 512), "image_grid_thw": torch.ones(3)}) is None
    )


# Without vLLM --------------------------------------------------------------------------------------------------

SMALL = SimpleNamespace(
    depth=1,
    hidden_size=32,
    intermediate_size=48,
    num_heads=2,
    out_hidden_size=16,
    patch_size=2,
    temporal_patch_size=1,
    in_channels=3,
    spatial_merge_size=2,
    deepstack_visual_indexes=[0],
    hidden_act="gelu_pytorch_tanh",
)


class SmallTower(torch.nn.Module):
    """Weights for `SMALL` by their paths, and tables that differ from position to position."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in shapes.items():
            path, _, kind = name.rpartition(".")
            module: torch.nn.Module = self
            for part in path.split("."):
                if not hasattr(module, part):
                    module.add_module(part, torch.nn.Module())
                module = getattr(module, part)
            tensor = torch.randn(shape, generator=generator) * 0.3
            setattr(module, kind, torch.nn.Parameter(tensor, requires_grad=False))
            module.eps = 1e-6
        self.pos_embed = torch.nn.Embedding(64, SMALL.hidden_size)
        angles = torch.rand(64, SMALL.hidden_size // SMALL.num_heads // 4, generator=generator)
        self.rotary_pos_emb = torch.nn.Module()
        self.rotary_pos_emb.cos_sin_cache = torch.cat((angles.cos(), angles.sin()), dim=1)


def small_adapter(dtype: torch.dtype = torch.float32) -> Qwen3VLEncoder:
    shapes = Qwen3VLEncoder(SMALL, dtype=dtype).weight_shapes
    return Qwen3VLEncoder(SMALL, dtype=dtype, tower=SmallTower(shapes).to(dtype))


def small_spec(dtype=torch.float32, adapter=None, **arguments):
    adapter = adapter or Qwen3VLEncoder(SMALL, dtype=dtype)
    form = plain_form(adapter.weight_shapes, dtype)
    return encoder_spec(
        adapter, form, BufferShape(9, 16, adapter.fat_dim, dtype), positions=64, buckets=(1, 2, 4), **arguments
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_bucket_obeys_the_rules_and_changes_the_buffer_alone(dtype):
    spec = small_spec(dtype)
    for bucket in spec.buckets:
        report = check_spec(spec, bucket)
        assert report.aliases == {"buffer": 0}
        assert not report.violations
        assert not any("vllm_neuron_cache" in name for name in report.operators)


def test_with_ranks_destinations_are_those_of_all_and_inputs_the_ranks_own():
    spec = small_spec(num_ranks=2, gather=lambda rows: torch.cat([rows, rows]))
    _, ids, rows, (segments, own), inputs, _ = spec.meta_args(4)
    assert (len(ids), len(rows), len(segments), len(own)) == (64, 64, 256, 128)
    assert {len(tensor) for tensor in inputs} == {128}
    assert check_spec(spec, 4).aliases == {"buffer": 0}


def reads_before_it_writes(spec):
    def fn(buffer, block_ids, block_rows, segment_ids, inputs, weights):
        patches, *others = inputs
        return spec.fn(buffer, block_ids, block_rows, segment_ids, (patches + buffer[0, 0, 0], *others), weights)

    return replace(spec, fn=fn)


def with_int64_places(spec):
    def example_args(bucket):
        buffer, block_ids, *others = spec.example_args(bucket)
        return buffer, block_ids.long(), *others

    return replace(spec, example_args=example_args)


def returns_the_buffer(spec):
    def fn(buffer, block_ids, block_rows, segment_ids, inputs, weights):
        return *spec.fn(buffer, block_ids, block_rows, segment_ids, inputs, weights), buffer

    return replace(spec, fn=fn)


def writes_through_a_view(spec):
    def fn(buffer, block_ids, block_rows, segment_ids, inputs, weights):
        return spec.fn(buffer[:8], block_ids, block_rows, segment_ids, inputs, weights)

    return replace(spec, fn=fn)


FAULTS = {
    "read_before_write": reads_before_it_writes,
    "int64_index": with_int64_places,
    "mutated_returned": returns_the_buffer,
    "mutation_through_view": writes_through_a_view,
}


@pytest.mark.parametrize(("rule", "plant"), FAULTS.items(), ids=FAULTS)
def test_a_graph_with_a_fault_is_refused(rule, plant):
    with pytest.raises(GraphRuleError) as caught:
        check_spec(plant(small_spec()), 2)
    assert rule in {violation.rule for violation in caught.value.violations}


class SkipsPadding(Qwen3VLEncoder):
    def forward(self, inputs, segment_ids, weights):
        live = segment_ids >= 0
        return super().forward(tuple(tensor[live][None] for tensor in inputs), segment_ids[live][None], weights)


class CountsSegments(Qwen3VLEncoder):
    def forward(self, inputs, segment_ids, weights):
        return super().forward(inputs, segment_ids, weights) * segment_ids.max().item()


class RanksOfItsOwn(Qwen3VLEncoder):
    def forward(self, inputs, segment_ids, weights):
        offset = segment_ids.max() - segment_ids.max()
        return super().forward(tuple(tensor[:, offset:] for tensor in inputs), segment_ids, weights)


@pytest.mark.parametrize("adapter", [SkipsPadding, CountsSegments, RanksOfItsOwn])
def test_an_adapter_that_depends_on_data_is_refused(adapter):
    with pytest.raises(GraphRuleError):
        check_spec(small_spec(adapter=adapter(SMALL, dtype=torch.float32)), 2)


@needs_compiler
def test_nothing_is_compiled_after_warm_up_whatever_the_mix(monkeypatch):
    buckets = (Bucket(64, 1), Bucket(64, 2))
    ladder = static_encoder.encoder_ladder(small_adapter(), 64)._replace(buckets=buckets)
    monkeypatch.setattr(static_encoder, "encoder_ladder", lambda *args: ladder)
    rank = Rank(adapter=small_adapter(), attention_block=64, block_size=4, num_blocks=257, lane="inductor")
    compiled = rank.lane.num_compiled
    generator = np.random.default_rng(0)
    used = set()
    for mix in range(60):
        rank.reset()
        items = {}
        for number in range(generator.integers(1, 7)):
            height, width = 2 * generator.integers(1, 5, 2)
            frames = int(generator.integers(1, 5))
            pixels = torch.randn(frames * height * width, rank.adapter.inputs[0].width)
            data = {"pixel_values_videos": pixels, "video_grid_thw": torch.tensor([[frames, height, width]])}
            items[f"{mix} {number}"] = rank.adapter.item("video", data)
        used |= {launch.bucket for launch in pack([i.segments for i in items.values()], rank.encoder.ladder)}
        encoded(rank, items)
    assert (rank.lane.num_compiled, rank.lane.num_recompiles_refused) == (compiled, 0)
    assert used == set(buckets)


@pytest.mark.parametrize("num_patches", [31, 33, 16])
def test_patches_that_are_not_those_of_the_grid_are_no_item(num_patches):
    """The model's own encoder would raise as well, and not take zeros for what is missing."""
    data = {"pixel_values_videos": torch.zeros(num_patches, 12), "video_grid_thw": torch.tensor([[2, 4, 4]])}
    with pytest.raises(ValueError, match=f"{num_patches} patches for a grid of 2 x 4 x 4"):
        small_adapter().item("video", data)


def refused(shapes, tower=None, dtype=torch.float32):
    adapter = small_adapter()
    with pytest.raises(ConfigurationError, match="compiled_encoder to false") as caught:
        ModelWeights(tower or adapter.tower, adapter.weight_shapes | shapes, dtype, call_layers=False).tensors  # noqa: B018
    return str(caught.value)


def test_weights_of_other_shapes_or_dtypes_are_refused():
    assert "blocks.0.attn.qkv.weight is [96, 32]" in refused({"blocks.0.attn.qkv.weight": (96, 33)})
    assert "merger.norm.bias is [32]" in refused({"merger.norm.bias": (128,)})
    assert "torch.bfloat16" in refused({}, dtype=torch.bfloat16)
    # As many numbers in another order are other weights.
    assert "blocks.0.attn.qkv.weight is [96, 32]" in refused({"blocks.0.attn.qkv.weight": (32, 96)})


def test_weights_that_the_model_has_not_are_refused():
    assert "blocks.1.norm1" in refused({"blocks.1.norm1.weight": (32,)})
    adapter = small_adapter()
    adapter.tower.blocks.get_submodule("0").attn.qkv.bias = None
    assert "blocks.0.attn.qkv.bias" in refused({}, adapter.tower)


def test_a_convolution_over_a_whole_patch_is_a_linear_layer():
    adapter = small_adapter()
    projection = adapter.tower.patch_embed.proj
    flat = projection.weight.data
    projection.weight = torch.nn.Parameter(flat.view(32, 3, 1, 2, 2), requires_grad=False)
    weights = ModelWeights(adapter.tower, adapter.weight_shapes, torch.float32, call_layers=False)
    tensor = dict(zip([info.name for info in weights.form.weights], weights.tensors))["patch_embed.proj.weight"]
    assert torch.equal(tensor, flat) and tensor.data_ptr() == projection.weight.data_ptr()

"""Lane `xla` and the vision encoder: one graph from pixels to rows in the cache, which it updates in place."""

from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_neuron_cache.encoders.qwen2_5_vl import Qwen2_5VLEncoder
from vllm_neuron_cache.encoders.qwen3_vl import Qwen3VLEncoder
from vllm_neuron_cache.encoders.qwen_omni_audio import QwenOmniAudioEncoder
from vllm_neuron_cache.encoders.weights import plain_form
from vllm_neuron_cache.errors import GraphRuleError
from vllm_neuron_cache.graphs.lanes.eager import EagerLane
from vllm_neuron_cache.graphs.lanes.xla import AliasProof, XlaLane
from vllm_neuron_cache.graphs.spec import BufferShape, GraphSpec, flatten, unflatten
from vllm_neuron_cache.graphs.vision_encoder import encoder_spec

# Looked for and not imported: only the lane can import torchax, which it adapts to this torch.
if not all(find_spec(name) for name in ("jax", "torchax")):
    pytest.skip("needs jax and torchax; scripts/xla_env runs these", allow_module_level=True)

pytestmark = pytest.mark.xla

CONFIG = SimpleNamespace(
    spatial_merge_size=2,
    hidden_size=32,
    num_heads=2,
    depth=2,
    deepstack_visual_indexes=[0],
    hidden_act="gelu_pytorch_tanh",
    out_hidden_size=64,
    in_channels=3,
    temporal_patch_size=2,
    patch_size=8,
    intermediate_size=64,
)
WINDOWS = SimpleNamespace(
    spatial_merge_size=2,
    hidden_size=32,
    num_heads=2,
    depth=2,
    fullatt_block_indexes=[1],
    window_size=32,
    hidden_act="silu",
    out_hidden_size=64,
    in_channels=3,
    temporal_patch_size=2,
    patch_size=8,
    intermediate_size=64,
)
SOUND = SimpleNamespace(
    d_model=32,
    encoder_attention_heads=2,
    encoder_ffn_dim=64,
    encoder_layers=2,
    activation_function="gelu",
    output_dim=64,
    num_mel_bins=16,
    n_window=8,
    max_source_positions=32,
)
POSITIONS, BLOCK_SIZE = 32, 4
ROWS = POSITIONS // 4
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02}


def spec_of(dtype: torch.dtype, num_blocks: int = 9) -> GraphSpec:
    adapter = Qwen3VLEncoder(CONFIG, dtype=dtype)
    buffer = BufferShape(num_blocks, BLOCK_SIZE, adapter.fat_dim, dtype)
    form = plain_form(adapter.weight_shapes, dtype)
    return encoder_spec(adapter, form, buffer, positions=POSITIONS, buckets=(1, 2), num_ranks=1)


def random_args(spec: GraphSpec, bucket: int) -> tuple[Any, ...]:
    """Three segments in a block, the last of them padding; every row to a place of its own."""
    generator = torch.Generator().manual_seed(0)
    example = spec.example_args(bucket)
    drawn = [
        torch.randn(tensor.shape, generator=generator).to(tensor.dtype) if tensor.dtype.is_floating_point else tensor
        for tensor in flatten(example)
    ]
    args = unflatten(drawn, example)
    buffer, block_ids, block_rows, (segment_ids,), _, _ = args
    buffer.zero_()
    block_ids.copy_(torch.arange(len(block_ids)) // BLOCK_SIZE)
    block_rows.copy_(torch.arange(len(block_rows)) % BLOCK_SIZE)
    segment_ids.copy_(torch.tensor([0] * 16 + [1] * 8 + [-1] * 8).repeat(bucket))
    return args


def proof_of(spec: GraphSpec, bucket: int) -> AliasProof:
    lane = XlaLane(strict=False)
    lane.lower(spec, bucket, spec.example_args(bucket))
    return lane.proofs[spec.name, bucket]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bucket", [1, 2])
def test_rows_are_those_of_eager_and_written_in_place(dtype, bucket):
    spec = spec_of(dtype)
    args = random_args(spec, bucket)
    expected = unflatten([tensor.clone() for tensor in flatten(args)], args)
    (expected_flags,) = EagerLane().lower(spec, bucket, expected)(*expected)
    lane = XlaLane()  # raises if the proof fails
    (flags,) = lane.lower(spec, bucket, args)(*args)

    rows, right = args[0].float(), expected[0].float()
    assert (rows - right).norm() <= TOLERANCE[dtype] * right.norm()
    # What no row went to is as it was.
    assert right.abs().sum() > 0 and not rows.view(-1, rows.shape[-1])[bucket * ROWS :].any()
    assert flags.all() and torch.equal(flags, expected_flags)
    proof = lane.proofs[spec.name, bucket]
    assert list(proof.aliases) == ["buffer"] and proof.alias_bytes == args[0].nbytes and proof.stable_pointers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_does_not_grow_with_the_cache(dtype):
    few, many = (proof_of(spec_of(dtype, num_blocks), 2) for num_blocks in (9, 90))
    assert few.temp_bytes == many.temp_bytes > 0
    assert not few.violations and not many.violations


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_encoder_that_copies_the_cache_is_refused(dtype):
    spec = spec_of(dtype, num_blocks=900)

    def copying(
        buffer: torch.Tensor,
        block_ids: torch.Tensor,
        block_rows: torch.Tensor,
        segment_ids: tuple[torch.Tensor, ...],
        inputs: tuple[torch.Tensor, ...],
        weights: tuple[torch.Tensor, ...],
    ) -> Any:
        before = buffer.roll(1, 0)
        (flags,) = spec.fn(buffer, block_ids, block_rows, segment_ids, inputs, weights)
        return flags, before

    wrong = replace(spec, fn=copying)
    with pytest.raises(GraphRuleError, match="alias_proof"):
        XlaLane().lower(wrong, 1, wrong.example_args(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bucket", [1, 2])
@pytest.mark.parametrize(
    ("adapter_cls", "config", "positions"), [(Qwen2_5VLEncoder, WINDOWS, 32), (QwenOmniAudioEncoder, SOUND, 8)]
)
def test_the_other_encoders_write_in_place(adapter_cls, config, positions, bucket, dtype):
    adapter = adapter_cls(config, dtype=dtype)
    buffer = BufferShape(90, BLOCK_SIZE, adapter.fat_dim, dtype)
    form = plain_form(adapter.weight_shapes, dtype)
    spec = encoder_spec(adapter, form, buffer, positions=positions, buckets=(1, 2))
    proof = proof_of(spec, bucket)
    assert not proof.violations and list(proof.aliases) == ["buffer"]

"""Runs an adapter's graph on cache blocks, for comparison with the model's own tower."""

from collections.abc import Mapping
from unittest import mock

import pytest
import torch
from small_encoder import Rank

from vllm_neuron_cache.encoder_cache.packing import Bucket, Ladder
from vllm_neuron_cache.encoders import static_encoder
from vllm_neuron_cache.encoders.interface import EncoderAdapter, EncoderItem
from vllm_neuron_cache.encoders.static_encoder import EncoderRanks, StaticEncoder, encoder_ladder, encoder_specs
from vllm_neuron_cache.encoders.weights import ModelWeights, plain_form
from vllm_neuron_cache.graphs.check import check_spec
from vllm_neuron_cache.graphs.lanes import make_lane
from vllm_neuron_cache.graphs.spec import BufferShape

ATTENTION_BLOCK = 256
LANES = [
    pytest.param("eager", True, id="eager with layers"),
    pytest.param("eager", False, id="eager"),
    pytest.param("check", False, id="check"),
    pytest.param("inductor", True, id="inductor with layers"),
]


def encode(
    adapter: EncoderAdapter,
    items: Mapping[str, EncoderItem],
    *,
    lane: str = "eager",
    call_layers: bool = False,
    bucket: Bucket | None = None,
) -> dict[str, torch.Tensor]:
    """Rows of the items, encoded together into cache blocks. With `bucket` there is a graph of that shape alone."""
    ladder = encoder_ladder(adapter, ATTENTION_BLOCK)
    if bucket is not None:
        ladder = ladder._replace(buckets=(bucket,))
    rank = Rank(block_size=64, num_blocks=65, attention_block=ATTENTION_BLOCK, warm=False, adapter=adapter)
    with mock.patch.object(static_encoder, "encoder_ladder", lambda *args: ladder):
        encoder = StaticEncoder(
            adapter,
            ModelWeights(adapter.tower, adapter.weight_shapes, adapter.dtype, call_layers=call_layers),
            rank.blocks,
            rank.writer,
            make_lane(lane),
            attention_block=ATTENTION_BLOCK,
        )
    with torch.inference_mode():
        rank.writer.warm_up()
        encoder.warm_up()
        rank.reserve_for(items)
        assert encoder.encode(items) == {}
        rank.blocks.check_integrity()
        return {key: rank.rows(key) for key in items}


def require_lane(lane: str) -> None:
    if lane == "inductor":
        from vllm_neuron_cache.graphs.lanes.inductor import compiler_available

        if not compiler_available():
            pytest.skip("inductor needs a C++ compiler, and there is none")


def error(rows: torch.Tensor, reference: torch.Tensor) -> float:
    """Relative, in float64."""
    assert rows.shape == reference.shape
    return float((rows.double() - reference.double()).norm() / reference.double().norm())


def errors(rows: Mapping[str, torch.Tensor], references: Mapping[str, torch.Tensor]) -> dict[str, float]:
    assert rows.keys() == references.keys()
    return {key: error(rows[key], references[key]) for key in rows}


def rounded_to(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """The module with parameters that this type can hold, as they are. Mutates it."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(parameter.to(dtype))
    return module


def check_rules(adapter: EncoderAdapter, ladder: Ladder) -> None:
    """Every graph in every bucket. Raises `GraphRuleError`."""
    form = plain_form(adapter.weight_shapes, adapter.dtype)
    buffer = BufferShape(9, 128, adapter.fat_dim, adapter.dtype)
    for spec in encoder_specs(adapter, form, buffer, ladder, EncoderRanks()).values():
        for bucket in spec.buckets:
            assert check_spec(spec, bucket).aliases == {"buffer": 0}

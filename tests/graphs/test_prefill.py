"""The language model with the merge in its graph: against an independent model, in every lane that runs here."""

from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prefill_on_lane import assert_close, chunks_of

from vllm_neuron_cache.encoder_cache.read_plan import ReadPlan, source_rows
from vllm_neuron_cache.errors import GraphRecompiledError, GraphRuleError
from vllm_neuron_cache.graphs.attention import PAGED_ATTENTION, AttentionMetadata, paged_attention, plain_attention
from vllm_neuron_cache.graphs.check import check_spec
from vllm_neuron_cache.graphs.decoder import DecoderShape, LayerWeights, decode_spec, prefill_spec
from vllm_neuron_cache.graphs.lanes import make_lane
from vllm_neuron_cache.graphs.lanes.inductor import compiler_available
from vllm_neuron_cache.graphs.prefill import TEXT_ROW, Decoder, prefill
from vllm_neuron_cache.graphs.spec import BufferShape, GraphSpec
from vllm_neuron_cache.source_rows import SourceRows

SHAPE = DecoderShape(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-6,
    dtype=torch.float32,
    num_slots=65,
    context_rows=48,
)
LEVELS = 2
BUFFER = BufferShape(9, 8, SHAPE.hidden_size * (1 + LEVELS), torch.float32)
PREFILL_BUCKETS, DECODE_BUCKETS = (4, 16), (1, 4)


def in_dtype(dtype: torch.dtype) -> tuple[BufferShape, DecoderShape]:
    return BUFFER._replace(dtype=dtype), SHAPE._replace(dtype=dtype)


def specs(dtype: torch.dtype, attention: Any = None) -> tuple[GraphSpec, GraphSpec]:
    buffer, shape = in_dtype(dtype)
    return (
        prefill_spec(PREFILL_BUCKETS, buffer, shape, attention=attention),
        decode_spec(DECODE_BUCKETS, shape, attention=attention),
    )


# The rules. ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", [None, plain_attention], ids=["opaque", "plain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_both_graphs_keep_the_rules_in_every_bucket(dtype, attention):
    for spec in specs(dtype, attention):
        for bucket in spec.buckets:
            report = check_spec(spec, bucket)
            caches = [f"{cache}[{i}]" for cache in ("key_caches", "value_caches") for i in range(SHAPE.num_layers)]
            assert list(report.aliases) == caches
            assert report.operators.get(PAGED_ATTENTION, 0) == (SHAPE.num_layers if attention is None else 0)


def test_decode_has_no_merge_inputs_and_gathers_nothing_but_embeddings():
    merging, plain = (check_spec(spec, spec.buckets[0]).operators for spec in specs(torch.float32))
    assert merging["aten.index_select.default"] == 1 + (1 + LEVELS) and merging["aten.where.self"] == 1 + LEVELS
    assert plain["aten.index_select.default"] == 1 and "aten.where.self" not in plain


def test_an_undeclared_opaque_operator_is_refused():
    for spec in specs(torch.float32):
        with pytest.raises(
            GraphRuleError, match=r"opaque_operator.*vllm_neuron_cache.paged_attention is none of torch"
        ):
            check_spec(replace(spec, opaque=frozenset()), spec.buckets[0])
        with pytest.raises(GraphRuleError, match="opaque_operator"):
            check_spec(replace(spec, opaque=frozenset({"vllm_neuron_cache.other"})), spec.buckets[0])


def test_a_cache_that_a_declared_operator_mutates_must_be_declared_too():
    spec = specs(torch.float32)[0]
    with pytest.raises(GraphRuleError, match=r"alias_map.*value_caches\[0\]: is mutated, and not declared"):
        check_spec(replace(spec, mutates=("key_caches",)), 4)


class Attended(NamedTuple):
    """Arguments of small graphs around the operator."""

    rows: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    ids: torch.Tensor

    @classmethod
    def example(cls, bucket: int) -> "Attended":
        cache = torch.zeros(8, 2, 4)
        return cls(torch.zeros(bucket, 2, 4), cache, cache.clone(), torch.zeros(bucket, dtype=torch.int32))


def attended(rows, keys, values, ids):
    return paged_attention(rows, rows, rows, keys, values, ids, ids, ids, ids, ids, ids)


def read_on_the_host(rows, keys, values, ids):
    return attended(rows, keys, values, ids) + keys[0, 0, 0].item()


def updated_again(rows, keys, values, ids):
    out = attended(rows, keys, values, ids)
    keys.index_put_((ids,), rows)
    return out


def scaled_as_a_whole(rows, keys, values, ids):
    out = attended(rows, keys, values, ids)
    values.mul_(2)
    return out


def indexed_by_its_result(rows, keys, values, ids):
    return rows.index_select(0, attended(rows, keys, values, ids)[:, 0, 0].int())


def selected_by_mask(rows, keys, values, ids):
    out = attended(rows, keys, values, ids)
    return rows.masked_scatter(out > 0, out)


@pytest.mark.parametrize(
    ("fn", "rule"),
    [
        (read_on_the_host, "host_transfer"),
        (updated_again, "whole_buffer_rewrite"),
        (scaled_as_a_whole, "whole_buffer_rewrite"),
        (indexed_by_its_result, "index_out_of_range"),
        (selected_by_mask, "boolean_index"),
    ],
)
def test_a_declared_operator_hides_no_fault_around_it(fn, rule):
    def spec_of(fn) -> GraphSpec:
        return GraphSpec(
            name="attended",
            fn=fn,
            mutates=("keys", "values"),
            buckets=(4,),
            bytes_per_row=32,
            example_args=Attended.example,
            index_limits={"ids": 8},
            opaque=frozenset({PAGED_ATTENTION}),
        )

    check_spec(spec_of(attended), 4)
    with pytest.raises(GraphRuleError, match=rf"\[{rule}\]"):
        check_spec(spec_of(fn), 4)


# The numbers. -------------------------------------------------------------------------------------------------------


class Request(NamedTuple):
    """A prompt with an item in it, and what an independent model makes of it."""

    input_ids: list[int]
    positions: torch.Tensor
    """`[3, length]`: temporal, height, width."""
    src_rows: list[int]
    hidden: torch.Tensor


class World(NamedTuple):
    """Random weights, a buffer, requests."""

    weights: tuple[torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor]
    rotary: Any
    buffer: torch.Tensor
    requests: list[Request]


def reference_model() -> Any:
    """A language model of another make: transformers' Qwen3-VL, with random weights."""
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel

    config = Qwen3VLTextConfig(
        vocab_size=SHAPE.vocab_size,
        hidden_size=SHAPE.hidden_size,
        intermediate_size=SHAPE.intermediate_size,
        num_hidden_layers=SHAPE.num_layers,
        num_attention_heads=SHAPE.num_heads,
        num_key_value_heads=SHAPE.num_kv_heads,
        head_dim=SHAPE.head_dim,
        rms_norm_eps=SHAPE.rms_norm_eps,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_interleaved": True,
            "mrope_section": [3, 3, 2],
        },
    )
    config._attn_implementation = "eager"
    torch.manual_seed(3)
    model = Qwen3VLTextModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.ndim == 1))
    return model


def layer_weights(layer: Any) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    return LayerWeights(
        input_norm=layer.input_layernorm.weight,
        qkv=torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]),
        q_norm=attention.q_norm.weight,
        k_norm=attention.k_norm.weight,
        o=attention.o_proj.weight,
        post_norm=layer.post_attention_layernorm.weight,
        gate_up=torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
        down=mlp.down_proj.weight,
    )


@pytest.fixture(scope="module")
def world() -> World:
    pytest.importorskip("transformers")
    model = reference_model()
    generator = torch.Generator().manual_seed(4)
    buffer = torch.randn(BUFFER.num_blocks, BUFFER.block_size, BUFFER.fat_dim, generator=generator)
    buffer[0, 0] = float("nan")  # what text names must not be computed with
    # Two requests; the same item twice in the second one, its rows in blocks that are apart.
    item = [9, 10, 11, 40, 41]
    layouts = [[TEXT_ROW] * 3 + item + [TEXT_ROW] * 3, [TEXT_ROW, *item[:3], TEXT_ROW, *item[:3], TEXT_ROW]]
    requests = []
    for src_rows in layouts:
        length = len(src_rows)
        input_ids = torch.randint(0, SHAPE.vocab_size, (length,), generator=generator)
        positions = torch.arange(length) + torch.randint(0, 5, (3, length), generator=generator)
        requests.append(
            Request(
                input_ids.tolist(), positions, src_rows, expected_hidden(model, input_ids, positions, src_rows, buffer)
            )
        )
    layers = tuple(weight.detach() for layer in model.layers for weight in layer_weights(layer))
    return World(
        (model.embed_tokens.weight.detach(), layers, model.norm.weight.detach()), model.rotary_emb, buffer, requests
    )


@torch.no_grad()
def expected_hidden(model, input_ids, positions, src_rows, buffer) -> torch.Tensor:
    rows = torch.tensor(src_rows)
    mask = rows >= 0
    levels = buffer.flatten(0, 1)[rows[mask]].split(SHAPE.hidden_size, dim=1)
    embeddings = model.embed_tokens(input_ids)
    embeddings[mask] = levels[0]
    return model(
        inputs_embeds=embeddings[None],
        position_ids=positions[:, None],
        visual_pos_masks=mask[None],
        deepstack_visual_embeds=list(levels[1:]),
        use_cache=False,
    ).last_hidden_state[0]


class Engine:
    """Runs requests through static graphs, in chunks, over one paged KV cache."""

    def __init__(self, world: World, lane: str, attention: Any = None) -> None:
        self.world = world
        self.lane = make_lane(lane)
        self.graphs = {
            (spec.name, bucket): self.lane.lower(spec, bucket, spec.example_args(bucket))
            for spec in specs(torch.float32, attention)
            for bucket in (spec.buckets if lane in ("eager", "check") else spec.buckets[-1:])  # compilers take seconds
        }
        self.lane.seal()
        self.caches = [
            tuple(torch.zeros(SHAPE.num_slots, SHAPE.num_kv_heads, SHAPE.head_dim) for _ in range(SHAPE.num_layers))
            for _ in range(2)
        ]
        order = np.random.default_rng(5).permutation(SHAPE.num_slots - 1)
        self.slots = [order[:32].tolist(), order[32:].tolist()]

    def run(self, parts: list[tuple[int, int, int]], shift: int = 0) -> list[torch.Tensor]:
        """Hidden states of one step: of each part `(request, begin, end)`. `shift` moves the rows that are taken."""
        requests = self.world.requests
        tokens = [(number, at) for number, begin, end in parts for at in range(begin, end)]
        src_rows = np.full(len(tokens), TEXT_ROW, dtype=np.int32)
        for row, (number, at) in enumerate(tokens):
            src_rows[row] = requests[number].src_rows[at]
        src_rows[src_rows >= 0] += shift
        name = "prefill" if (src_rows >= 0).any() else "decode"
        bucket = min(size for graph, size in self.graphs if graph == name and size >= len(tokens))
        context = [(number, at) for number, _, end in parts for at in range(end)]

        def padded(values: list[int], size: int, padding: int) -> torch.Tensor:
            return torch.tensor([*values, *[padding] * (size - len(values))], dtype=torch.int32)

        dummy = SHAPE.num_slots - 1
        metadata = AttentionMetadata(
            slots=padded([self.slots[number][at] for number, at in tokens], bucket, dummy),
            context_slots=padded([self.slots[number][at] for number, at in context], SHAPE.context_rows, dummy),
            query_sequences=padded([number for number, _ in tokens], bucket, -1),
            query_positions=padded([at for _, at in tokens], bucket, 0),
            context_sequences=padded([number for number, _ in context], SHAPE.context_rows, -2),
            context_positions=padded([at for _, at in context], SHAPE.context_rows, 0),
        )
        positions = torch.stack([requests[number].positions[:, at] for number, at in tokens], dim=1)
        cos, sin = self.world.rotary(torch.zeros(1), positions[:, None])
        angles = [torch.zeros(bucket, SHAPE.head_dim // 2) for _ in range(2)]
        for target, values in zip(angles, (cos, sin)):
            target[: len(tokens)] = values[0, :, : SHAPE.head_dim // 2]
        embed_tokens, layers, norm = self.world.weights
        input_ids = padded([requests[number].input_ids[at] for number, at in tokens], bucket, 0)
        merge = (padded(src_rows.tolist(), bucket, TEXT_ROW), self.world.buffer) if name == "prefill" else ()
        hidden = self.graphs[name, bucket](
            input_ids, *angles, *merge, embed_tokens, layers, norm, *self.caches, tuple(metadata)
        )
        hidden = hidden[0] if isinstance(hidden, list | tuple) else hidden
        ends = np.cumsum([0] + [end - begin for _, begin, end in parts])
        return [hidden[first:last] for first, last in pairwise(ends)]


STEPS = (
    # Chunks that cut items, one request beside the other; then text, by the graph without a merge.
    [(0, 0, 4), (1, 0, 3)],
    [(0, 4, 6), (1, 3, 8)],
    [(0, 6, 8)],
    [(1, 8, 9), (0, 8, 9)],
    [(0, 9, 11)],
)


def lanes() -> list[Any]:
    inductor = pytest.mark.skipif(not compiler_available(), reason="inductor needs a C++ compiler")
    xla = pytest.mark.skipif(
        not all(find_spec(name) for name in ("jax", "torchax")),
        reason="needs jax and torchax; scripts/xla_env runs this",
    )
    return [
        pytest.param("eager", None, id="eager"),
        pytest.param("check", None, id="check"),
        pytest.param("inductor", None, id="inductor", marks=inductor),
        pytest.param("xla", plain_attention, id="xla", marks=[pytest.mark.xla, xla]),
    ]


@pytest.mark.parametrize(("lane", "attention"), lanes())
@torch.no_grad()
def test_chunks_of_two_requests_give_the_hidden_states_of_another_model(world, lane, attention):
    engine = Engine(world, lane, attention)
    outputs = [[], []]
    for parts in STEPS:
        for (number, _, _), hidden in zip(parts, engine.run(parts)):
            outputs[number].append(hidden)
    for request, hidden in zip(world.requests, outputs):
        torch.testing.assert_close(torch.cat(hidden), request.hidden, rtol=2e-4, atol=2e-4)
    assert engine.lane.num_recompiles_refused == 0
    if lane != "eager":
        (args,) = [spec.example_args(4) for spec in specs(torch.float32, attention) if spec.name == "prefill"]
        with pytest.raises(GraphRecompiledError):
            engine.graphs["prefill", 16](*args)


@torch.no_grad()
def test_control_other_rows_give_other_hidden_states(world):
    engine = Engine(world, "eager")
    (right,) = engine.run([(0, 0, 8)])
    (shifted,) = engine.run([(0, 0, 8)], shift=1)
    assert (right - shifted)[3:].abs().max() > 0.1
    damaged = world._replace(buffer=world.buffer.clone())
    damaged.buffer[:, :, SHAPE.hidden_size :] = 0
    (without_deepstack,) = Engine(damaged, "eager").run([(0, 0, 8)])
    assert (right - without_deepstack)[3:].abs().max() > 0.1
    assert torch.equal(right[:3], without_deepstack[:3])  # text before it sees nothing of it


# The function. ------------------------------------------------------------------------------------------------------


def toy_decoder(num_layers: int, width: int) -> Decoder:
    def layer(positions, hidden, residual):
        residual = hidden if residual is None else hidden + residual
        return residual * 0.5 + positions, residual

    return Decoder(
        embed_tokens=lambda ids: ids[:, None].float().expand(-1, width).clone(),
        layers=[layer] * num_layers,
        norm=lambda hidden, residual: (hidden + residual, residual),
    )


def straight(num_layers, input_ids, positions, src_rows, buffer) -> torch.Tensor:
    """One token after the other."""
    width = buffer.shape[1] // 3
    outputs = []
    for token, position, row in zip(input_ids.tolist(), positions, src_rows.tolist()):
        levels = buffer[row].split(width) if row >= 0 else None
        hidden = torch.full((width,), float(token)) if levels is None else levels[0]
        residual = torch.zeros(width)
        for number in range(num_layers):
            residual = residual + hidden
            hidden = residual * 0.5 + position
            if levels is not None and number < 2:
                hidden = hidden + levels[1 + number]
        outputs.append(hidden + residual)
    return torch.stack(outputs)


@given(
    src_rows=st.lists(st.one_of(st.just(TEXT_ROW), st.integers(0, 19)), min_size=1, max_size=12),
    num_layers=st.integers(2, 4),
)
def test_every_row_gets_its_own_or_none(src_rows, num_layers):
    """Repeats, the first and the last row of the buffer, text alone, cached rows alone, as many layers as levels."""
    rows = torch.tensor(src_rows, dtype=torch.int32)
    buffer = torch.randn(20, 6, generator=torch.Generator().manual_seed(1))
    ids = torch.arange(len(rows))
    positions = torch.linspace(0, 1, len(rows))[:, None]
    decoder = toy_decoder(num_layers, width=2)
    torch.testing.assert_close(
        prefill(decoder, ids, positions, rows, buffer), straight(num_layers, ids, positions, rows, buffer)
    )
    if not (rows >= 0).any():
        assert torch.equal(prefill(decoder, ids, positions, rows, buffer), prefill(decoder, ids, positions))


# The host's side. ---------------------------------------------------------------------------------------------------


def plan(pairs: dict[int, int], num_tokens: int, bucket: int = 8) -> ReadPlan:
    """A plan of pairs from step row to buffer row, padded."""
    dst_rows, src_rows = np.full(bucket, 99, dtype=np.int32), np.full(bucket, 64, dtype=np.int32)
    dst_rows[: len(pairs)], src_rows[: len(pairs)] = list(pairs), list(pairs.values())
    return ReadPlan(len(pairs), bucket, src_rows, dst_rows, np.zeros(num_tokens, dtype=bool))


def test_source_rows_name_the_row_of_each_token_and_nothing_of_the_plan_before():
    out = np.full(6, 7, dtype=np.int32)
    source_rows(plan({1: 40, 2: 41, 4: 40}, 5), out)
    assert out.tolist() == [-1, 40, 41, -1, 40, -1]
    source_rows(plan({0: 3}, 1), out)
    assert out.tolist() == [3, -1, -1, -1, -1, -1]


def test_a_step_takes_what_was_filled_once_and_padding_is_text():
    rows = SourceRows(6, torch.device("cpu"))
    assert rows.take(3) is None
    rows.fill(plan({1: 40}, 2))
    taken = rows.take(4)
    assert taken.tolist() == [-1, 40, -1, -1] and taken.dtype is torch.int32
    assert rows.take(4) is None
    rows.fill(plan({}, 2))  # every request of the step was left out
    assert rows.take(4) is None
    rows.fill_with_text()
    assert rows.take(6).tolist() == [TEXT_ROW] * 6


# The cache's own rows in it, as a device will have it (test_neuron_device.py) ---------------------------------------


@torch.inference_mode()
@pytest.mark.parametrize(
    "lane",
    [
        pytest.param(
            "inductor", marks=pytest.mark.skipif(not compiler_available(), reason="inductor needs a C++ compiler")
        ),
        "check",
    ],
)
def test_chunks_over_the_caches_own_buffer_are_the_same_in_every_lane(lane):
    expected = chunks_of(make_lane("eager"), torch.device("cpu"))
    assert all(torch.isfinite(hidden).all() for hidden in expected)
    assert_close(chunks_of(make_lane(lane), torch.device("cpu")), expected)
    moved = chunks_of(make_lane("eager"), torch.device("cpu"), item_at=21)
    with pytest.raises(AssertionError):
        assert_close(moved, expected)

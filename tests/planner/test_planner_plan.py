"""The plan itself: blocks, bytes, padding, residents, budgets, and the configuration to paste."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from published_configs import CHECKPOINTS, write_checkpoint

from vllm_neuron_cache.config import NeuronCacheConfig
from vllm_neuron_cache.encoder_cache.item import num_dense_blocks
from vllm_neuron_cache.encoder_cache.sizing import cache_geometry, num_blocks_needed, round_up_num_blocks
from vllm_neuron_cache.errors import ConfigurationError, PlannerError
from vllm_neuron_cache.planner.items import MediaSize, parse_sizes
from vllm_neuron_cache.planner.model import load_model_shape
from vllm_neuron_cache.planner.plan import make_plan, stage_cache_bytes
from vllm_neuron_cache.planner.tokens import smallest_image_tokens
from vllm_neuron_cache.planner.values import GIB, PlanRequest, SimulatedHits

SQUARE = parse_sizes("512x512")


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    return {name: load_model_shape(write_checkpoint(folder / name, name)) for name in CHECKPOINTS}


@pytest.fixture(scope="module")
def big(shapes):
    return shapes["Qwen3-VL-32B"]


def plan_of(shape, sizes=SQUARE, simulate=None, **request):
    return make_plan(shape, PlanRequest(sizes=sizes, **request), simulate)


media = st.lists(
    st.builds(
        MediaSize,
        width=st.integers(100, 3000),
        height=st.integers(100, 3000),
        frames=st.one_of(st.none(), st.integers(1, 100)),
        count=st.integers(1, 50),
    ),
    min_size=1,
    max_size=6,
).map(tuple)


# Without a budget -------------------------------------------------------------------------------------------------


def test_the_32b_model_without_a_budget(big):
    plan = plan_of(big)
    assert plan.largest_items == {"image": 16384, "video": 12288}
    assert plan.encoder_cache_size == 16384, "the largest image is more than a step's tokens"
    assert plan.geometry == (1025, 16, 512)
    assert plan.num_blocks_needed == 1025
    assert plan.block_bytes == 16 * 20480 * 2
    assert plan.buffer.bytes_per_rank == 1025 * 16 * 20480 * 2
    (square,) = plan.sizes
    assert (square.tokens, square.blocks, square.resident, square.refused) == (256, 16, 64, False)
    assert plan.warnings == ()


def test_a_larger_step_needs_a_larger_cache(big):
    plan = plan_of(big, max_num_batched_tokens=45536)
    assert plan.encoder_cache_size == 45536
    assert plan.num_blocks_needed == 45536 // 16 + 1
    assert plan.geometry.num_blocks == 2944 + 1, "the next rung"


def test_where_single_frames_are_limited_the_largest_video_follows_the_longest_sequence(shapes):
    shape = shapes["Qwen2.5-VL-7B"]
    assert plan_of(shape).largest_items == {"image": 16384, "video": 7 * 16384}
    assert plan_of(shape, max_model_len=32768).largest_items == {"image": 16384, "video": 2 * 16384}


def test_every_rank_holds_the_whole_cache(big):
    alone, four = plan_of(big), plan_of(big, tensor_parallel_size=4)
    assert four.buffer.bytes_per_rank == alone.buffer.bytes_per_rank
    assert four.buffer.bytes_total == 4 * alone.buffer.bytes_total
    assert alone.buffer.bytes_total == alone.buffer.bytes_per_rank


def test_the_block_size_is_at_most_a_quarter_of_the_smallest_image(shapes):
    for shape in shapes.values():
        block_size = plan_of(shape).geometry.block_size
        assert block_size == 16 or 4 * block_size <= smallest_image_tokens(shape)


def test_larger_smallest_images_get_larger_blocks(big):
    limits = big.image_limits._replace(min_pixels=512 * 512)
    assert plan_of(dataclasses.replace(big, image_limits=limits)).geometry.block_size == 64


# With a budget ----------------------------------------------------------------------------------------------------


@given(gib=st.floats(0.01, 200), sizes=media)
def test_a_budget_takes_as_many_blocks_as_it_holds(shapes, gib, sizes):
    for shape in shapes.values():
        plan = plan_of(shape, sizes, hbm_gib=gib)
        assert plan.buffer.bytes_per_rank <= gib * GIB < plan.buffer.bytes_per_rank + plan.block_bytes
        assert plan.geometry.num_blocks == plan.buffer.num_blocks


def test_a_budget_below_the_largest_item_is_answered_with_a_warning(big):
    plan = plan_of(big, parse_sizes("512x512,4096x4096"), hbm_gib=0.5)
    assert plan.geometry.num_blocks < plan.num_blocks_needed == 1025
    assert [size.refused for size in plan.sizes] == [False, True]
    assert plan.sizes[1].resident == 0
    below, refused, long = plan.warnings
    assert "819 blocks are fewer than the 1025" in below and "818 blocks (13088 rows)" in below
    assert refused == "Refused on arrival: 4096x4096."
    assert "4096x4096" in long and "512 rows" in long and "512x512" not in long


def test_what_vllm_refuses_by_its_rows_is_refused_however_large_the_cache(shapes):
    plan = plan_of(shapes["Qwen2.5-VL-7B"], parse_sizes("2000x2000x40"), max_model_len=4096, hbm_gib=50)
    assert plan.sizes[0].tokens > plan.encoder_cache_size and plan.sizes[0].refused
    assert plan.geometry.num_blocks > plan.num_blocks_needed


def test_a_budget_below_two_blocks_is_refused_with_the_least(big):
    block = 16 * 20480 * 2
    with pytest.raises(PlannerError, match=r"hold 1 blocks of 0\.62 MiB .* at least two") as caught:
        plan_of(big, hbm_gib=1.5 * block / GIB)
    assert f"{2 * block / GIB:.6f} GiB" in str(caught.value)
    assert plan_of(big, hbm_gib=2 * block / GIB).geometry.num_blocks == 2


# Items and padding ------------------------------------------------------------------------------------------------


@given(sizes=media, gib=st.one_of(st.none(), st.floats(0.1, 100)))
def test_blocks_hold_the_rows(shapes, sizes, gib):
    for shape in shapes.values():
        plan = plan_of(shape, sizes, hbm_gib=gib)
        block_size = plan.geometry.block_size
        for size in plan.sizes:
            assert size.blocks * block_size >= size.tokens
            assert size.blocks >= num_dense_blocks(size.tokens, block_size)
            assert size.resident * size.blocks <= plan.geometry.num_item_blocks
        assert all(0 <= size.padding_waste < 1 for size in plan.block_sizes)


@given(sizes=media)
def test_finer_blocks_waste_less(shapes, sizes):
    for shape in shapes.values():
        # Room for every video by frames: in a pool too small for that it lies densely, in coarse blocks first.
        plan = plan_of(shape, sizes, hbm_gib=1000)
        wastes = [size.padding_waste for size in plan.block_sizes]
        assert wastes == sorted(wastes, reverse=True)


@given(sizes=media)
def test_more_hbm_holds_no_fewer_items(shapes, sizes):
    for shape in shapes.values():
        residents = [buffer.resident for buffer in plan_of(shape, sizes).buffers]
        assert residents == sorted(residents)


def test_block_sizes_are_divisors_from_coarse_to_fine(big):
    assert [size.block_size for size in plan_of(big).block_sizes] == [512, 256, 128, 64, 32, 16]
    odd = plan_of(big, encoder_attention_block_size=1536)
    assert [size.block_size for size in odd.block_sizes] == [384, 128, 64, 32, 16]


def test_padding_of_eighty_rows(big):
    """The example of docs/configuration.md."""
    plan = plan_of(big, parse_sizes("320x256"))
    assert plan.sizes[0].tokens == 80
    wastes = {size.block_size: size.padding_waste for size in plan.block_sizes}
    assert wastes[512] == pytest.approx(0.84375) and wastes[64] == pytest.approx(0.375) and wastes[16] == 0


def test_a_budget_of_less_than_two_coarse_blocks_holds_nothing_there(big):
    plan = plan_of(big, parse_sizes("320x256"), hbm_gib=0.03)
    coarse, *_, fine = plan.block_sizes
    assert (coarse.num_blocks, coarse.resident) == (0, 0)
    assert fine.resident > 0


def test_counts_weigh(big):
    plan = plan_of(big, (MediaSize(width=512, height=512, count=3), MediaSize(width=320, height=256, count=1)))
    assert plan.mean_item_tokens == (3 * 256 + 80) / 4
    assert plan.buffer.resident == 1024 * 4 // (3 * 16 + 5)


def test_frames_stay_within_the_encoders_blocks_where_the_cache_sees_them(big, shapes):
    # 24 x 14 = 336 rows a frame: one to an encoder's block of 512, so 21 blocks of 16 each.
    assert plan_of(big, parse_sizes("768x448x8")).sizes[0].blocks == 4 * 21
    # 27 x 16 = 432 rows, of which a dense layout fills the last block of the whole alone.
    (video,) = plan_of(shapes["Qwen2.5-VL-7B"], parse_sizes("768x448x8")).sizes
    assert (video.tokens, video.blocks) == (4 * 432, 4 * 27)


# The load ---------------------------------------------------------------------------------------------------------


def simulator(calls):
    def simulate(geometry, item_tokens, reuse):
        calls.append((geometry, list(item_tokens), reuse))
        return SimulatedHits(hit_rate=0.5, encoder_tokens_saved_fraction=0.25)

    return simulate


def test_the_simulator_gets_geometry_items_and_reuse(big):
    calls = []
    sizes = (MediaSize(width=512, height=512, count=2), MediaSize(width=320, height=256))
    plan = plan_of(big, sizes, simulator(calls), reuse=0.6, encode_ms_per_1k_tokens=40)
    assert calls == [(plan.geometry, [256, 256, 80], 0.6)]
    assert plan.simulated == (0.5, 0.25)
    assert plan.encode_seconds_per_1000 == pytest.approx((256 * 2 + 80) / 3 * 40 / 1000)
    assert plan.saved_seconds_per_1000 == pytest.approx(plan.encode_seconds_per_1000 / 4)


def test_a_long_list_of_items_is_thinned_out_in_proportion(big):
    calls = []
    sizes = (MediaSize(width=512, height=512, count=3 * 10**8), MediaSize(width=320, height=256, count=10**8))
    plan_of(big, sizes, simulator(calls), reuse=0)
    ((_, items, _),) = calls
    assert (items.count(256), items.count(80)) == (7500, 2500)


def test_without_simulator_or_reuse_the_rest_is_there(big):
    calls = []
    for plan in (plan_of(big, reuse=0.5), plan_of(big, simulate=simulator(calls), encode_ms_per_1k_tokens=40)):
        assert plan.simulated is None and plan.saved_seconds_per_1000 is None
        assert plan.buffer.num_blocks == 1025
    assert calls == []
    assert plan_of(big).encode_seconds_per_1000 is None


# The stage cache --------------------------------------------------------------------------------------------------


def test_host_memory_of_the_stage_cache():
    hidden = stage_cache_bytes(15092, 16, 2048, "bfloat16")
    assert hidden == 15092 * 16 * 2048 * 2 and round(hidden / GIB, 2) == 0.92
    codes = stage_cache_bytes(16180, 16, 16, "int64")
    assert round(codes / 1e6, 1) == 33.1 and round(codes / 2**20, 1) == 31.6
    with pytest.raises(PlannerError, match="dtype is 'int4'"):
        stage_cache_bytes(1, 1, 1, "int4")


def test_an_omni_plan_has_its_keys(shapes, big):
    hidden, codes = plan_of(shapes["Qwen3-Omni-30B-A3B"], kv_blocks=15092).stage
    assert (hidden.bytes_per_block, round(hidden.bytes / GIB, 2)) == (16 * 2048 * 2, 0.92)
    assert (codes.width, codes.dtype, codes.bytes_per_block) == (16, "int64", 16 * 16 * 8)
    assert plan_of(shapes["Qwen3-Omni-30B-A3B"]).stage[0].bytes is None
    assert plan_of(big, kv_blocks=15092).stage == ()


def test_clips_of_audio_take_blocks_too(shapes):
    (clip,) = plan_of(shapes["Qwen3-Omni-30B-A3B"], parse_sizes("30s")).sizes
    assert (clip.tokens, clip.blocks) == (390, 25)


# What to configure ------------------------------------------------------------------------------------------------


def engines_geometry(plan):
    """What an engine makes of the configuration to paste, as its own start-up computes it."""
    config = NeuronCacheConfig.from_additional_config(json.loads(json.dumps(plan.additional_config)))
    return cache_geometry(
        config,
        merge_factor=plan.shape.merge_factor,
        encoder_cache_size=max(plan.request.max_num_batched_tokens, *plan.largest_items.values()),
        largest_item_tokens=plan.largest_items.values(),
    )


@given(
    gib=st.one_of(st.none(), st.floats(0.1, 100)),
    tokens=st.integers(1, 100_000),
    patches=st.sampled_from([1024, 1536, 2048, 4096, 65536]),
)
def test_an_engine_with_the_configuration_has_the_planned_geometry(shapes, gib, tokens, patches):
    for shape in shapes.values():
        plan = plan_of(shape, hbm_gib=gib, max_num_batched_tokens=tokens, encoder_attention_block_size=patches)
        assert engines_geometry(plan) == plan.geometry


def test_without_a_budget_an_engine_that_needs_more_takes_more(big):
    plan = plan_of(big)
    config = NeuronCacheConfig.from_additional_config(plan.additional_config)
    geometry = cache_geometry(config, merge_factor=4, encoder_cache_size=100_000, largest_item_tokens=())
    assert geometry.num_blocks == round_up_num_blocks(num_blocks_needed(16, 100_000, ())) > plan.geometry.num_blocks


def test_vllms_own_options_stand_beside_it(big):
    assert plan_of(big).vllm_arguments == {"--dtype": "bfloat16", "--max-num-batched-tokens": 2048}
    assert plan_of(big, max_model_len=8192, tensor_parallel_size=8, max_num_batched_tokens=4096).vllm_arguments == {
        "--dtype": "bfloat16",
        "--max-num-batched-tokens": 4096,
        "--max-model-len": 8192,
        "--tensor-parallel-size": 8,
    }


@pytest.mark.vllm
@pytest.mark.parametrize("additional", [False, True])
def test_an_engine_of_the_demo_checkpoint_resolves_the_planned_geometry(checkpoint, additional):
    pytest.importorskip("vllm", reason="vLLM is not installed (extra 'cpu')")
    from vllm.engine.arg_utils import EngineArgs

    from vllm_neuron_cache.integrations.vllm.geometry import resolve_geometry

    plan = plan_of(load_model_shape(checkpoint), hbm_gib=0.01 if additional else None, max_num_batched_tokens=3000)
    config = plan.additional_config
    if not additional:  # the engine's own count, with nothing said of it
        del config["encoder_neuron_config"]["encoder_cache_num_blocks"]
    arguments = EngineArgs(
        model=str(checkpoint), max_num_batched_tokens=3000, dtype="bfloat16", additional_config=config
    )
    assert resolve_geometry(arguments.create_engine_config()) == plan.geometry


# Refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"sizes": ()}, "no sizes"),
        ({"reuse": 1.1}, "reuse is 1.1"),
        ({"reuse": -0.1}, "reuse is -0.1"),
        ({"reuse": float("nan")}, "reuse is nan"),
        ({"hbm_gib": 0}, "HBM in GiB is 0"),
        ({"hbm_gib": float("nan")}, "HBM in GiB is nan"),
        ({"hbm_gib": float("inf")}, "HBM in GiB is inf"),
        ({"encode_ms_per_1k_tokens": -1}, "encode time in ms is -1"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0"),
        ({"max_model_len": 0}, "max_model_len is 0"),
        ({"kv_blocks": 0}, "kv_blocks is 0"),
        ({"kv_block_size": 0}, "kv_block_size is 0"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(request_, words):
    with pytest.raises(PlannerError, match=words):
        PlanRequest(**({"sizes": SQUARE} | request_))


@pytest.mark.parametrize("patches", [0, 2047])
def test_an_attention_block_that_cannot_be_is_refused(big, patches):
    with pytest.raises(ConfigurationError, match="encoder_attention_block_size"):
        plan_of(big, encoder_attention_block_size=patches)

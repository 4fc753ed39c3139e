"""Which stages get a cache: the reference's table row by row, with plain objects. vLLM's own are in
test_stage_vllm_layouts.py."""

from types import SimpleNamespace

import pytest

from vllm_neuron_cache.errors import NeuronCacheError, OmniPrefixCacheUnmatchError
from vllm_neuron_cache.stage_cache import (
    FullAttentionGroupView,
    PrefixCacheConfig,
    holds_mirror,
    stage_prefix_cache_config,
)


class FullAttentionSpec(SimpleNamespace):
    pass


class MLAAttentionSpec(SimpleNamespace):
    pass


def spec(cls=FullAttentionSpec, **fields):
    return cls(**{"block_size": 16, "sliding_window": None, "attention_chunk_size": None} | fields)


def groups(*specs):
    return [SimpleNamespace(kv_cache_spec=each, layer_names=["layer"]) for each in specs]


def stage(**changes):
    """The arguments of a stage that gets a cache, with changes."""
    return {
        "kv_cache_config": SimpleNamespace(num_blocks=100, kv_cache_groups=groups(spec())),
        "cache_config": SimpleNamespace(enable_prefix_caching=True, prefix_match_unit=None),
        "kv_transfer_config": None,
        "scheduler_config": SimpleNamespace(max_num_batched_tokens=2048),
        "model_config": SimpleNamespace(max_model_len=4096),
        "is_pooling_model": False,
    } | changes


def cache_config(**changes):
    return SimpleNamespace(**{"enable_prefix_caching": True, "prefix_match_unit": None} | changes)


def kv_config(*specs, **changes):
    return SimpleNamespace(**{"num_blocks": 100, "kv_cache_groups": groups(*specs)} | changes)


def refusal(**changes):
    with pytest.raises(OmniPrefixCacheUnmatchError) as caught:
        stage_prefix_cache_config(**stage(**changes))
    message = str(caught.value)
    assert "turn enable_prefix_caching off for this stage" in message, "the remedy"
    return message


@pytest.mark.parametrize("cls", [FullAttentionSpec, MLAAttentionSpec])
def test_one_group_of_full_attention_gets_a_cache_of_its_size(cls):
    config = stage_prefix_cache_config(
        **stage(kv_cache_config=kv_config(spec(cls, block_size=32))), host_bytes=1000, device_bytes=2000
    )
    assert config == PrefixCacheConfig(
        num_blocks=100, block_size=32, staging_capacity_tokens=2048, host_bytes=1000, device_bytes=2000
    )


def test_the_caps_have_no_default_limit():
    config = stage_prefix_cache_config(**stage())
    assert (config.host_bytes, config.device_bytes) == (None, None)


@pytest.mark.parametrize(
    "changes",
    [
        {"is_pooling_model": True},
        # Even where it would be refused.
        {"is_pooling_model": True, "kv_transfer_config": SimpleNamespace(is_kv_consumer=True)},
        {"kv_cache_config": None},
        {"cache_config": cache_config(enable_prefix_caching=False)},
        {"cache_config": cache_config(enable_prefix_caching=False), "kv_cache_config": kv_config()},
        {"cache_config": cache_config(enable_prefix_caching=None)},
    ],
    ids=["pooling", "pooling consumer", "diffusion", "prefix caching off", "off and hybrid", "not set"],
)
def test_who_has_no_use_for_a_cache_gets_none(changes):
    assert stage_prefix_cache_config(**stage(**changes)) is None


@pytest.mark.parametrize("role", ["kv_consumer", "kv_both"])
def test_who_receives_kv_is_refused(role):
    config = SimpleNamespace(is_kv_consumer=True, kv_role=role)
    message = refusal(kv_transfer_config=config)
    assert f"kv_role {role}" in message and "reported like a local hit" in message and "kv_producer" in message


def test_who_sends_kv_is_not_affected():
    config = SimpleNamespace(is_kv_consumer=False, kv_role="kv_producer")
    assert stage_prefix_cache_config(**stage(kv_transfer_config=config)).num_blocks == 100


def test_a_transfer_whose_direction_is_unknown_is_refused():
    assert "kv_transfer_config has no is_kv_consumer" in refusal(kv_transfer_config=SimpleNamespace())


def test_speculation_is_refused():
    message = refusal(speculative_config=SimpleNamespace(num_speculative_tokens=1))
    assert "speculative decoding" in message and "wrong slots" in message


@pytest.mark.parametrize("unit", [1, 4, 8, 15])
def test_a_match_unit_within_a_block_is_refused(unit):
    message = refusal(cache_config=cache_config(prefix_match_unit=unit))
    assert f"prefix_match_unit {unit}" in message and "block of 16" in message


@pytest.mark.parametrize("unit", [None, 16])
def test_a_match_unit_of_whole_blocks_is_not(unit):
    assert stage_prefix_cache_config(**stage(cache_config=cache_config(prefix_match_unit=unit))) is not None


@pytest.mark.parametrize("number", [0, 2, 3])
def test_any_other_number_of_groups_than_one_is_refused(number):
    message = refusal(kv_cache_config=kv_config(*[spec()] * number))
    assert f"{number} groups of layers" in message and "mirrors exactly one" in message


@pytest.mark.parametrize("name", ["sliding_window", "attention_chunk_size"])
def test_a_window_in_full_attention_is_refused(name):
    message = refusal(kv_cache_config=kv_config(spec(**{name: 512})))
    assert f"{name} 512" in message and "given up before a request ends" in message


@pytest.mark.parametrize("name", ["SlidingWindowSpec", "MambaSpec", "HiddenStateCacheSpec", "SomethingNew"])
def test_any_other_kind_of_group_is_refused(name):
    subclass = type(name, (FullAttentionSpec,), {})
    message = refusal(kv_cache_config=kv_config(spec(subclass)))
    assert f"the KV group is a {name}" in message and "FullAttentionSpec and MLAAttentionSpec alone" in message


@pytest.mark.parametrize("name", ["decode_context_parallel_size", "prefill_context_parallel_size"])
@pytest.mark.parametrize("where", ["model_config", "cache_config", "kv_cache_config"])
def test_context_parallelism_is_refused_where_the_gate_can_see_it(name, where):
    arguments = stage()
    setattr(arguments[where], name, 2)
    with pytest.raises(OmniPrefixCacheUnmatchError, match=f"{name} 2 spreads the tokens"):
        stage_prefix_cache_config(**arguments)
    arguments = stage()
    arguments[where].parallel_config = SimpleNamespace(**{name: 4})
    with pytest.raises(OmniPrefixCacheUnmatchError, match=f"{name} 4 spreads the tokens"):
        stage_prefix_cache_config(**arguments)


def test_a_stage_that_decodes_codecs_is_refused():
    message = refusal(model_config=SimpleNamespace(worker_type="generation", model_stage="code2wav", max_model_len=9))
    assert "stage code2wav decodes codecs" in message
    assert stage_prefix_cache_config(**stage(model_config=SimpleNamespace(worker_type="ar", max_model_len=9)))


def test_a_stage_that_decodes_codecs_without_prefix_caching_gets_none():
    codec = SimpleNamespace(worker_type="generation", model_stage="code2wav")
    off = cache_config(enable_prefix_caching=False)
    assert stage_prefix_cache_config(**stage(model_config=codec, cache_config=off)) is None


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"cache_config": SimpleNamespace()}, "cache_config has no enable_prefix_caching"),
        ({"kv_cache_config": SimpleNamespace(num_blocks=3)}, "kv_cache_config has no kv_cache_groups"),
        (
            {"kv_cache_config": SimpleNamespace(kv_cache_groups=groups(spec()))},
            "kv_cache_config has no num_blocks",
        ),
        (
            {"kv_cache_config": SimpleNamespace(num_blocks=3, kv_cache_groups=[SimpleNamespace()])},
            "KV group has no kv_cache_spec",
        ),
        ({"kv_cache_config": kv_config(FullAttentionSpec())}, "spec has no block_size"),
    ],
)
def test_what_is_unknown_is_refused(changes, what):
    message = refusal(**changes)
    assert what in message and "unknown whether the stage cache can mirror this stage" in message


def test_the_staging_is_as_large_as_a_step():
    for scheduler, model, expected in (
        (SimpleNamespace(max_num_batched_tokens=77), SimpleNamespace(max_model_len=9), 77),
        (SimpleNamespace(), SimpleNamespace(max_model_len=9), 9),
        (None, SimpleNamespace(max_model_len=9), 9),
    ):
        config = stage_prefix_cache_config(**stage(scheduler_config=scheduler, model_config=model))
        assert config.staging_capacity_tokens == expected
    message = refusal(scheduler_config=None, model_config=SimpleNamespace())
    assert "max_num_batched_tokens" in message and "max_model_len" in message


def test_every_refusal_has_a_message_of_its_own():
    refusals = [
        {"kv_transfer_config": SimpleNamespace(is_kv_consumer=True)},
        {"speculative_config": object()},
        {"cache_config": cache_config(prefix_match_unit=8)},
        {"kv_cache_config": kv_config()},
        {"kv_cache_config": kv_config(SimpleNamespace(block_size=16))},
        {"kv_cache_config": kv_config(spec(sliding_window=4))},
        {"kv_cache_config": kv_config(spec(attention_chunk_size=4))},
        {"model_config": SimpleNamespace(worker_type="generation")},
        {"model_config": SimpleNamespace(decode_context_parallel_size=2)},
        {"scheduler_config": None, "model_config": None},
    ]
    messages = [refusal(**changes) for changes in refusals]
    assert len(set(messages)) == len(messages)


def test_a_refusal_is_an_error_of_this_package_and_a_runtime_error():
    """vLLM-Omni's callers catch the latter."""
    with pytest.raises(RuntimeError) as caught:
        stage_prefix_cache_config(**stage(speculative_config=object()))
    assert isinstance(caught.value, NeuronCacheError) and type(caught.value) is OmniPrefixCacheUnmatchError


def test_one_rank_alone_holds_the_mirror():
    holders = [
        (pipeline, tensor)
        for pipeline in range(3)
        for tensor in range(4)
        if holds_mirror(pipeline_rank=pipeline, pipeline_size=3, tensor_rank=tensor)
    ]
    assert holders == [(2, 0)]
    assert holds_mirror(pipeline_rank=0, pipeline_size=1, tensor_rank=0)


# The view repeats what only the first step knows ----------------------------------------------------------------------


def table(**changes):
    return SimpleNamespace(
        **{
            "use_hybrid_blocks": False,
            "blocks_per_kv_block": 1,
            "dcp_world_size": 1,
            "pcp_world_size": 1,
            "kv_cache_block_size": 16,
        }
        | changes
    )


def batch(*tables):
    return SimpleNamespace(block_table=SimpleNamespace(block_tables=list(tables)))


def without(name):
    fields = vars(table())
    del fields[name]
    return SimpleNamespace(**fields)


def test_a_table_that_slots_mirror_is_taken():
    assert FullAttentionGroupView(batch(table()), 16).block_size == 16
    assert FullAttentionGroupView(batch(table(block_size=16)), 16).block_size == 16


@pytest.mark.parametrize(
    ("tables", "what"),
    [
        ([], "exactly one block table and the batch has 0"),
        ([table(), table()], "exactly one block table and the batch has 2"),
        ([table(use_hybrid_blocks=True, blocks_per_kv_block=4)], "splits each block of 16 into 4 kernel blocks"),
        ([table(use_hybrid_blocks=True)], "kernel blocks"),
        ([table(blocks_per_kv_block=2)], "into 2 kernel blocks"),
        ([table(dcp_world_size=2)], "dcp_world_size is 2"),
        ([table(pcp_world_size=4)], "pcp_world_size is 4"),
        ([without("dcp_world_size")], "dcp_world_size is None, and must be known"),
        ([without("pcp_world_size")], "pcp_world_size is None, and must be known"),
        ([table(kv_cache_block_size=32)], "blocks of 16 slots and the batch's block table of 32"),
        ([without("kv_cache_block_size")], "block table of None"),
    ],
)
def test_a_table_that_slots_do_not_mirror_is_refused(tables, what):
    with pytest.raises(OmniPrefixCacheUnmatchError, match=what):
        FullAttentionGroupView(batch(*tables), 16)


def test_a_batch_of_another_make_is_refused():
    with pytest.raises(OmniPrefixCacheUnmatchError, match="the batch has no"):
        FullAttentionGroupView(SimpleNamespace(block_table=SimpleNamespace()), 16)


def test_a_table_that_says_nothing_of_split_blocks_is_refused():
    """One of the two marks is enough, and none is not: it may split them."""
    for name in ("use_hybrid_blocks", "blocks_per_kv_block"):
        unmarked = without(name)
        FullAttentionGroupView(batch(unmarked), 16)
    del unmarked.use_hybrid_blocks
    with pytest.raises(OmniPrefixCacheUnmatchError, match="an unknown number of kernel blocks"):
        FullAttentionGroupView(batch(unmarked), 16)


def test_the_tables_of_vllm_0_32_have_kv_blocks_alone():
    newer = SimpleNamespace(block_size=16, dcp_world_size=1, pcp_world_size=1)
    assert FullAttentionGroupView(batch(newer), 16).block_size == 16
    newer.block_size = 32
    with pytest.raises(OmniPrefixCacheUnmatchError, match="block table of 32"):
        FullAttentionGroupView(batch(newer), 16)

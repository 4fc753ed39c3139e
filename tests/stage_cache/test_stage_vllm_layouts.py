"""The gate on vLLM's own configurations, and the view on its own batch."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed (extra 'cpu')")

import torch
from vllm.config import CacheConfig, KVTransferConfig, SchedulerConfig
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.utils.cpu_triton_utils import compute_slot_mapping_kernel
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.worker import block_table
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from vllm_neuron_cache.errors import OmniPrefixCacheUnmatchError
from vllm_neuron_cache.stage_cache import FullAttentionGroupView, stage_prefix_cache_config

pytestmark = pytest.mark.vllm

SIZES = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}


def full(**changes):
    return kv.FullAttentionSpec(**SIZES | changes)


def kv_cache_config(*specs, num_blocks=40):
    groups = [kv.KVCacheGroupSpec([f"layer{index}"], spec) for index, spec in enumerate(specs)]
    return kv.KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)


def scheduler_config(**changes):
    sizes = {"max_num_batched_tokens": 512, "max_num_seqs": 8, "max_model_len": 512, "is_encoder_decoder": False}
    return SchedulerConfig(**sizes | changes)


def gate(*specs, **changes):
    arguments = {
        "kv_cache_config": kv_cache_config(*specs or (full(),)),
        "cache_config": CacheConfig(block_size=16, enable_prefix_caching=True),
        "kv_transfer_config": None,
        "scheduler_config": scheduler_config(),
        "model_config": SimpleNamespace(max_model_len=512),
        "is_pooling_model": False,
    }
    return stage_prefix_cache_config(**arguments | changes)


def test_the_common_stage_gets_a_cache():
    config = gate()
    assert (config.num_blocks, config.block_size, config.staging_capacity_tokens) == (40, 16, 512)


def test_latent_attention_gets_one_too():
    assert gate(kv.MLAAttentionSpec(**SIZES)) is not None


MAMBA = {"block_size": 16, "shapes": ((4,),), "dtypes": (torch.float32,)}


@pytest.mark.parametrize(
    "spec",
    [
        lambda: kv.SlidingWindowSpec(**SIZES, sliding_window=32),
        lambda: kv.ChunkedLocalAttentionSpec(**SIZES, attention_chunk_size=32),
        lambda: kv.MambaSpec(**MAMBA),
        lambda: kv.CrossAttentionSpec(**SIZES),
        lambda: kv.EncoderOnlyAttentionSpec(**SIZES),
        lambda: kv.SinkFullAttentionSpec(**SIZES, sink_len=4),
        lambda: kv.HiddenStateCacheSpec(**SIZES),
        lambda: kv.UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": full(), "b": full(head_size=16)}),
    ],
    ids=["sliding", "chunked", "mamba", "cross", "encoder only", "sink", "hidden states", "uniform"],
)
def test_groups_that_are_not_of_full_attention_are_refused(spec):
    with pytest.raises(OmniPrefixCacheUnmatchError, match=f"the KV group is a {type(spec()).__name__}"):
        gate(spec())


@pytest.mark.parametrize("window", [{"sliding_window": 32}, {"attention_chunk_size": 32}])
def test_windows_that_are_kept_as_full_attention_are_refused(window):
    """As vLLM has it where its allocator for hybrid models is off."""
    (name,) = window
    with pytest.raises(OmniPrefixCacheUnmatchError, match=f"{name} 32"):
        gate(full(**window))


def test_several_groups_are_refused():
    with pytest.raises(OmniPrefixCacheUnmatchError, match="2 groups of layers"):
        gate(full(), kv.SlidingWindowSpec(**SIZES, sliding_window=32))


@pytest.mark.parametrize(("role", "refused"), [("kv_consumer", True), ("kv_both", True), ("kv_producer", False)])
def test_kv_roles(role, refused):
    transfer = KVTransferConfig(kv_connector="ExampleConnector", kv_role=role)
    if refused:
        with pytest.raises(OmniPrefixCacheUnmatchError, match=f"kv_role {role}"):
            gate(kv_transfer_config=transfer)
    else:
        assert gate(kv_transfer_config=transfer) is not None


def test_prefix_caching_off_and_match_units():
    assert gate(cache_config=CacheConfig(block_size=16, enable_prefix_caching=False)) is None
    with pytest.raises(OmniPrefixCacheUnmatchError, match="prefix_match_unit 8"):
        gate(cache_config=CacheConfig(block_size=16, enable_prefix_caching=True, prefix_match_unit=8))
    assert gate(cache_config=CacheConfig(block_size=16, enable_prefix_caching=True, prefix_match_unit=16)) is not None


# The batch ------------------------------------------------------------------------------------------------------------


def make_batch(block_sizes=(4,), kernel_block_sizes=None, max_model_len=256):
    return InputBatch(
        max_num_reqs=6,
        max_model_len=max_model_len,
        max_num_batched_tokens=256,
        device=torch.device("cpu"),
        vocab_size=32,
        block_sizes=list(block_sizes),
        kernel_block_sizes=list(kernel_block_sizes or block_sizes),
        max_num_blocks_per_req=[-(-max_model_len // size) for size in block_sizes],
    )


def add(batch, req_id, num_prompt, num_computed, blocks):
    batch.add_request(
        CachedRequestState(
            req_id=req_id,
            prompt_token_ids=list(range(num_prompt)),
            mm_features=[],
            sampling_params=SamplingParams(),
            generator=None,
            block_ids=tuple(blocks),
            num_computed_tokens=num_computed,
            output_token_ids=[],
        )
    )


@pytest.fixture(autouse=True)
def kernel_on_cpu(monkeypatch):
    """vLLM's slot mapping, as its CPU runner has it."""
    current_platform.import_kernels()
    monkeypatch.setattr(block_table._COMPUTE_SLOT_MAPPING_KERNEL, "kernel", compute_slot_mapping_kernel)


def expected_slots(batch, num_scheduled):
    """Where vLLM puts the rows: its own kernel."""
    counts = [num_scheduled.get(req_id, 0) for req_id in batch.req_ids]
    starts = batch.num_computed_tokens_cpu[: len(counts)]
    positions = [start + offset for start, count in zip(starts, counts) for offset in range(count)]
    table = batch.block_table
    table.commit_block_table(len(counts))
    table.compute_slot_mapping(
        len(counts),
        torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32),
        torch.tensor(positions, dtype=torch.int64),
    )
    return table[0].slot_mapping.gpu[: len(positions)].tolist()


def assert_layout(view, batch, num_scheduled):
    layout = view.step_layout(num_scheduled)
    assert layout.slots.tolist() == expected_slots(batch, num_scheduled)
    assert list(layout.req_ids) == batch.req_ids
    counts = [num_scheduled.get(req_id, 0) for req_id in batch.req_ids]
    assert layout.counts.tolist() == counts
    assert layout.row_stops.tolist() == np.cumsum(counts).tolist()
    # The blocks say the same as the slots.
    spread = [
        block * view.block_size + offset + row
        for block, offset, count in zip(layout.block_ids, layout.block_offsets, layout.block_rows)
        for row in range(count)
    ]
    assert spread == layout.slots.tolist()
    assert len(set(layout.block_ids.tolist())) == len(layout.block_ids)
    assert (layout.block_rows > 0).all()
    return layout


def test_slots_are_those_of_vllms_own_mapping():
    batch = make_batch()
    view = FullAttentionGroupView(batch, 4)
    add(batch, "a", 20, 0, [[3, 9, 1, 12, 5]])
    add(batch, "b", 9, 8, [[7, 2, 8]])
    add(batch, "c", 30, 13, [[11, 13, 15, 17, 19, 21, 23]])
    assert_layout(view, batch, {"a": 18, "b": 1, "c": 11})
    assert_layout(view, batch, {"a": 3, "b": 1, "c": 3})
    # Everybody decodes.
    batch.num_computed_tokens_cpu[:3] = [17, 8, 15]
    layout = assert_layout(view, batch, {"a": 1, "b": 1, "c": 1})
    assert layout.block_ids.tolist() == [5, 8, 17]
    assert view.block_ids(2, 5, 15).tolist() == [13, 15, 17]
    assert view.block_ids(2, 0, 4).tolist() == [11]
    assert view.block_ids(0, 16, 17).tolist() == [5]


def test_the_batch_may_change_in_every_way_it_does():
    batch = make_batch()
    view = FullAttentionGroupView(batch, 4)
    for index, req_id in enumerate("abcde"):
        add(batch, req_id, 12, index, [[10 * index + 1, 10 * index + 2, 10 * index + 3]])
    earlier = view.step_layout(dict.fromkeys("abcde", 2))
    kept = earlier.slots.tolist(), list(earlier.req_ids), earlier.starts.tolist()
    batch.remove_request("b")
    batch.remove_request("d")
    batch.condense()
    assert sorted(batch.req_ids) == ["a", "c", "e"]
    assert_layout(view, batch, {"a": 4, "c": 1, "e": 5})
    add(batch, "f", 4, 0, [[44]])
    batch.block_table.append_row(([55, 56],), batch.req_id_to_index["f"])
    batch.swap_states(0, 1)
    assert_layout(view, batch, {"a": 1, "c": 2, "e": 1, "f": 12})
    batch.num_computed_tokens_cpu[batch.req_id_to_index["f"]] = 11
    assert_layout(view, batch, dict.fromkeys("acef", 1))
    # What an earlier step saw is as it was.
    assert kept == (earlier.slots.tolist(), list(earlier.req_ids), earlier.starts.tolist())


def test_requests_that_are_not_scheduled_have_no_rows():
    batch = make_batch()
    view = FullAttentionGroupView(batch, 4)
    for index, req_id in enumerate("abc"):
        add(batch, req_id, 12, 4 * index, [[10 * index + 1, 10 * index + 2, 10 * index + 3]])
    assert_layout(view, batch, {"b": 5})
    assert_layout(view, batch, {"a": 1, "c": 1})
    assert_layout(view, batch, {"a": 2, "c": 1})
    empty = view.step_layout({})
    assert not len(empty.slots) and not len(empty.block_ids)


def test_an_empty_batch():
    layout = FullAttentionGroupView(make_batch(), 4).step_layout({})
    assert list(layout.req_ids) == [] and layout.slots.tolist() == []


def test_random_batches():
    choose = np.random.default_rng(5)
    for block_size in (1, 4, 16):
        batch = make_batch(block_sizes=(block_size,), max_model_len=64)
        view = FullAttentionGroupView(batch, block_size)
        for trial in range(60):
            for req_id in list(batch.req_ids):
                if choose.random() < 0.4:
                    batch.remove_request(req_id)
            batch.condense()
            batch.refresh_metadata()
            free = iter(choose.permutation(np.arange(1, 6 * 64 + 1)))
            while batch.num_reqs < choose.integers(1, 7):
                add(batch, f"r{trial}-{batch.num_reqs}", 64, 0, [[]])
            num_scheduled = {}
            for index, req_id in enumerate(batch.req_ids):
                count = int(choose.integers(0, 20)) if choose.random() < 0.7 else 1
                start = int(choose.integers(0, 64 - count + 1))
                batch.num_computed_tokens_cpu[index] = start
                blocks = [int(next(free)) for _ in range(-(-(start + count) // block_size))]
                batch.block_table.add_row((blocks,), index)
                if count:
                    num_scheduled[req_id] = count
            assert_layout(view, batch, num_scheduled)


def test_split_kernel_blocks_are_refused():
    with pytest.raises(OmniPrefixCacheUnmatchError, match="splits each block of 32 into 2 kernel blocks"):
        FullAttentionGroupView(make_batch((32,), (16,)), 32)


def test_several_block_tables_are_refused():
    with pytest.raises(OmniPrefixCacheUnmatchError, match="the batch has 2"):
        FullAttentionGroupView(make_batch((4, 4)), 4)


def test_another_block_size_is_refused():
    with pytest.raises(OmniPrefixCacheUnmatchError, match="blocks of 8 slots and the batch's block table of 4"):
        FullAttentionGroupView(make_batch(), 8)


@pytest.mark.parametrize("name", ["dcp_world_size", "pcp_world_size"])
def test_context_parallel_tables_are_refused(name):
    batch = make_batch()
    setattr(batch.block_table[0], name, 2)
    with pytest.raises(OmniPrefixCacheUnmatchError, match=f"{name} is 2"):
        FullAttentionGroupView(batch, 4)


def test_positions_beyond_the_table_are_refused():
    batch = make_batch(max_model_len=16)
    view = FullAttentionGroupView(batch, 4)
    width = batch.block_table[0].block_table.np.shape[1]
    add(batch, "a", 4, 0, [[1]])
    batch.num_computed_tokens_cpu[0] = 4 * width
    with pytest.raises(OmniPrefixCacheUnmatchError, match=f"request a computes rows in block {width}"):
        view.step_layout({"a": 1})

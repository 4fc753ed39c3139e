"""The cache manager on vLLM's own request objects: stock decisions at one row a block, block-exact ones above."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

pytest.importorskip("vllm", reason="vLLM is not installed (extra 'cpu')")

import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.request import Request

from vllm_neuron_cache.encoder_cache.sizing import CacheGeometry
from vllm_neuron_cache.encoder_cache.table import EntryTable
from vllm_neuron_cache.integrations.vllm.manager import BlockEncoderCacheManager

pytestmark = pytest.mark.vllm

LOTS = 1 << 20


def request(name: str, *items: tuple[str, int], masks: dict[str, list[bool]] | None = None) -> Request:
    """A request of (identifier, rows) items, one after the other with a text token between."""
    features, offset = [], 1
    for identifier, rows in items:
        mask = (masks or {}).get(identifier)
        length = rows if mask is None else len(mask)
        features.append(
            MultiModalFeatureSpec(
                data=None,
                modality="image" if mask is None else "video",
                identifier=identifier,
                mm_position=PlaceholderRange(
                    offset=offset, length=length, is_embed=None if mask is None else torch.tensor(mask)
                ),
            )
        )
        offset += length + 1
    return Request(
        request_id=name,
        prompt_token_ids=[0] * (offset + 1),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        mm_features=features,
    )


def manager(num_item_blocks: int, block_size: int = 4, encoder_block_size: int | None = None):
    geometry = CacheGeometry(num_item_blocks + 1, block_size, encoder_block_size or block_size)
    return BlockEncoderCacheManager(geometry, cache_size=num_item_blocks * block_size)


def encode(cache: BlockEncoderCacheManager, requested: Request, table: EntryTable | None = None) -> list[int]:
    """One pass that schedules whatever the request can have now, as vLLM's scheduler does. Returns encoded inputs.

    A worker's `table` follows, if there is one.
    """
    accepted, rows, scheduled = [], 0, True
    for index, feature in enumerate(requested.mm_features):
        if feature.identifier in {requested.mm_features[i].identifier for i in accepted}:
            continue
        if cache.check_and_update_cache(requested, index):
            continue
        if not cache.can_allocate(requested, index, LOTS, rows):
            scheduled = bool(index)
            break
        accepted.append(index)
        rows += feature.mm_position.get_num_embeds()
    for index in accepted:
        cache.allocate(requested, index)
    step = cache.get_manager_metadata()
    if table is not None:
        table.apply(step.step)
    cache.end_pass({requested.request_id} if scheduled else set(), {requested.request_id: accepted})
    cache.acknowledge(step)
    cache.check_integrity()
    return accepted


def test_items_before_in_the_pass_are_counted_in_blocks():
    """Rows: 5 + 5 = 10 of 12. Blocks of 4: 2 + 2 of 3. vLLM's row count would let both in."""
    cache = manager(num_item_blocks=3)
    assert encode(cache, request("r", ("a", 5), ("b", 5))) == [0]
    assert cache.pool.num_used_blocks == 2


def test_an_item_of_the_whole_pool_fits_and_evicts_everything():
    cache = manager(num_item_blocks=3)
    small = request("small", ("a", 1), ("b", 4))
    assert encode(cache, small) == [0, 1]
    cache.free(small)
    assert encode(cache, request("large", ("c", 12))) == [0]
    assert cache.get_freed_mm_hashes() == ["a", "b"]


def test_nothing_in_use_is_evicted():
    cache = manager(num_item_blocks=3)
    assert encode(cache, request("holder", ("a", 8))) == [0]
    assert encode(cache, request("other", ("b", 8))) == []
    assert cache.pool.get("a") is not None


def test_an_item_that_waits_counts_once_however_often_it_asks():
    cache = manager(num_item_blocks=3)
    holder, other = request("holder", ("a", 8)), request("other", ("b", 8), ("c", 4))
    encode(cache, holder)
    for _ in range(5):
        assert encode(cache, other) == []
    assert cache.stats.of("image").waits == 1
    cache.free(holder)
    assert encode(cache, other) == [0, 1]
    assert (cache.stats.waits, cache.stats.misses) == (1, 3) and not cache._waiting


def test_who_leaves_waits_no_longer():
    cache = manager(num_item_blocks=2)
    encode(cache, request("holder", ("a", 8)))
    other = request("other", ("b", 4))
    encode(cache, other)
    cache.free(other)
    assert cache.stats.waits == 1 and not cache._waiting


def test_counters_are_kept_by_modality_and_gauges_add_up():
    cache = manager(num_item_blocks=4)
    first = request("r", ("i", 5), ("v", 6), masks={"v": [True] * 3 + [False] + [True] * 3})
    assert encode(cache, first) == [0, 1]
    cache.free(first)
    assert cache.check_and_update_cache(request("again", ("v", 6), masks={"v": [True] * 7}), 0) is False
    encode(cache, request("next", ("w", 4)))
    counts = {modality: (c.hits, c.misses, c.evictions) for modality, c in cache.stats.by_modality.items()}
    assert counts == {"image": (0, 2, 1), "video": (0, 1, 0)}
    gauges = cache.gauges()
    assert sum(gauges.blocks) == 4 and gauges.num_items == 2 and gauges.num_tokens == 10
    assert gauges.padding_waste == pytest.approx(1 - 10 / (4 * (4 - gauges.blocks.free)))


def test_an_item_twice_in_a_prompt_takes_its_blocks_once_and_stays_until_the_last_use():
    cache = manager(num_item_blocks=2)
    twice = request("r", ("a", 4), ("a", 4))
    assert encode(cache, twice) == [0]
    assert cache.check_and_update_cache(twice, 1)
    assert cache.pool.num_used_blocks == 1
    cache.free_encoder_input(twice, 0)
    assert cache.pool.get("a").references == {"r"}
    cache.free_encoder_input(twice, 1)
    assert not cache.pool.get("a").references
    assert cache.stats.queries == 1


def test_fifty_references_in_one_prompt_cost_one_item():
    cache = manager(num_item_blocks=2)
    many = request("r", *[("a", 4)] * 50)
    assert encode(cache, many) == [0]
    assert all(cache.check_and_update_cache(many, index) for index in range(50))
    assert (cache.pool.num_used_blocks, cache.stats.hits, cache.stats.misses) == (1, 0, 1)


def test_a_reference_taken_in_a_pass_without_being_scheduled_is_dropped():
    cache = manager(num_item_blocks=2)
    first, waiting = request("first", ("a", 4)), request("waiting", ("a", 4))
    encode(cache, first)
    cache.free(first)
    assert cache.check_and_update_cache(waiting, 0)
    cache.get_manager_metadata()
    cache.end_pass(scheduled=set(), encoder_inputs={})
    assert not cache.pool.get("a").references
    assert (cache.stats.hits, cache.stats.misses) == (0, 1)
    cache.check_integrity()


def test_a_reference_from_an_earlier_pass_survives_a_pass_without_the_request():
    cache = manager(num_item_blocks=2)
    holder = request("holder", ("a", 4))
    encode(cache, holder)
    assert cache.check_and_update_cache(holder, 0)
    cache.get_manager_metadata()
    cache.end_pass(scheduled=set(), encoder_inputs={})
    assert cache.pool.get("a").references == {"holder"}


def test_evicted_and_allocated_again_in_one_pass_is_not_reported_freed():
    cache = manager(num_item_blocks=2)
    first = request("first", ("a", 4))
    encode(cache, first)
    generation = cache.pool.get("a").generation
    cache.free(first)
    second, third = request("second", ("b", 8)), request("third", ("a", 4))
    assert cache.can_allocate(second, 0, LOTS, 0)  # evicts a; the request is then not scheduled after all
    assert cache.can_allocate(third, 0, LOTS, 0)
    cache.allocate(third, 0)
    assert cache.get_freed_mm_hashes() == []
    (delta,) = cache.get_manager_metadata().step.deltas
    assert delta.freed == (("a", generation),)
    assert [(entry.key, entry.generation) for entry in delta.allocated] == [("a", generation + 1)]


def test_free_ten_times_frees_once():
    cache = manager(num_item_blocks=3)
    once = request("r", ("a", 4))
    encode(cache, once)
    for _ in range(10):
        cache.free(once)
        cache.free_encoder_input(once, 0)
        cache.check_integrity()
    assert cache.pool.num_free_blocks + cache.pool.num_evictable_blocks == 3


def test_aborted_in_the_step_that_allocated_it_leaks_nothing():
    cache = manager(num_item_blocks=2)
    aborted = request("r", ("a", 8))
    assert cache.can_allocate(aborted, 0, LOTS, 0)
    cache.allocate(aborted, 0)
    step = cache.get_manager_metadata()
    cache.free(aborted)
    assert not cache.pool.can_reserve(1)  # a worker may be writing it
    cache.acknowledge(step)
    assert cache.pool.can_reserve(2)
    cache.check_integrity()


def test_reset_forgets_everything_and_late_frees_do_no_harm():
    cache = manager(num_item_blocks=2)
    running = request("r", ("a", 8))
    encode(cache, running)
    cache.reset()
    cache.free(running)
    cache.check_integrity()
    assert cache.pool.num_free_blocks == 2
    assert encode(cache, request("again", ("a", 8))) == [0]
    assert cache.get_manager_metadata().step.epoch == 1


def test_compute_budget_is_respected():
    cache = manager(num_item_blocks=3)
    assert not cache.can_allocate(request("r", ("a", 5)), 0, 4, 0)
    assert cache.can_allocate(request("r", ("a", 5)), 0, 5, 0)


def test_a_video_lies_in_whole_frames():
    """Frames of 3 rows in blocks of 4: one frame a block, where a dense layout would take 3 blocks for 4 frames."""
    mask = ([True] * 3 + [False] * 2) * 4
    cache = manager(num_item_blocks=8)
    encode(cache, request("r", ("video", 12), masks={"video": mask}))
    assert cache.pool.get("video").layout.tokens_per_block == (3, 3, 3, 3)


def test_a_video_whose_frames_would_not_fit_lies_densely():
    mask = ([True] * 3 + [False] * 2) * 4
    cache = manager(num_item_blocks=3)
    assert encode(cache, request("r", ("video", 12), masks={"video": mask})) == [0]
    assert cache.pool.get("video").layout.tokens_per_block == (4, 4, 4)


def reserved_and_preempted(cache: BlockEncoderCacheManager) -> Request:
    """A request that reserves "a" in the pass and is preempted before the pass ends."""
    preempted = request("preempted", ("a", 4))
    assert cache.can_allocate(preempted, 0, LOTS, 0)
    cache.allocate(preempted, 0)
    cache.free(preempted)
    return preempted


def test_a_reservation_whose_request_is_preempted_in_the_pass_is_rolled_back():
    cache = manager(num_item_blocks=2)
    preempted = reserved_and_preempted(cache)
    metadata = cache.get_manager_metadata()
    encoder_inputs: dict[str, list[int]] = {}
    cache.end_pass(set(), encoder_inputs)
    cache.check_integrity()
    assert encoder_inputs == {}
    assert cache.pool.num_free_blocks == 2 and cache.stats.misses == 0
    cache.acknowledge(metadata)
    # The workers were told of the reservation; the next step takes it back, and the item is encoded as if new.
    assert encode(cache, preempted) == [0]
    (delta,) = cache.get_manager_metadata().step.deltas or [None]
    assert delta is None or delta.seq > metadata.step.seq


def test_the_rolled_back_reservation_leaves_the_workers_table():
    cache = manager(num_item_blocks=2)
    table = EntryTable(2, 4)
    reserved_and_preempted(cache)
    table.apply(cache.get_manager_metadata().step)
    cache.end_pass(set(), {})
    assert table.get("a") is not None
    table.apply(cache.get_manager_metadata().step)
    assert table.get("a") is None


def test_a_request_in_the_step_encodes_what_a_preempted_one_reserved():
    cache = manager(num_item_blocks=2)
    reserved_and_preempted(cache)
    reader = request("reader", ("z", 1), ("a", 4))
    assert cache.check_and_update_cache(reader, 1)
    metadata = cache.get_manager_metadata()
    encoder_inputs = {"other": [3]}
    cache.end_pass({"reader", "other"}, encoder_inputs)
    assert encoder_inputs == {"other": [3], "reader": [1]}
    assert cache.pool.get("a").references == {"reader"}
    cache.acknowledge(metadata)
    cache.check_integrity()


def test_an_id_sent_again_with_media_of_another_size_is_encoded_again():
    cache = manager(num_item_blocks=4)
    first, second = request("first", ("id", 8)), request("second", ("id", 5))
    assert encode(cache, first) == [0]
    assert not cache.check_and_update_cache(second, 0)
    assert not cache.can_allocate(second, 0, LOTS, 0)  # the first still reads its own
    cache.free(first)
    assert encode(cache, second) == [0]
    assert cache.pool.get("id").layout.num_tokens == 5
    assert cache.stats.evictions == 1


def test_an_id_sent_again_with_another_video_gets_the_other_videos_layout():
    cache = manager(num_item_blocks=8)
    first = request("first", ("id", 6), masks={"id": [True, True, True, False] * 2})
    second = request("second", ("id", 4), masks={"id": [True, True, False] * 2})
    assert encode(cache, first) == [0]
    for index in list(cache.get_cached_input_ids(first)):
        cache.free_encoder_input(first, index)  # the request itself lives on
    assert encode(cache, second) == [0]
    assert cache.pool.get("id").layout.tokens_per_block == (4,)


NAMES = ("a", "b", "c", "d", "e")
ROWS = {"a": 1, "b": 2, "c": 3, "d": 5, "e": 7}
CAPACITY = 8


class SameAsStock(RuleBasedStateMachine):
    """With blocks of one row and every step acknowledged at once, each answer is the stock manager's."""

    def __init__(self):
        super().__init__()
        self.stock, self.ours = EncoderCacheManager(CAPACITY), manager(CAPACITY, block_size=1)
        self.alive: dict[str, Request] = {}
        self.count = 0

    @rule(names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=3))
    def arrive(self, names):
        self.count += 1
        arrived = request(f"r{self.count}", *((name, ROWS[name]) for name in names))
        self.alive[arrived.request_id] = arrived

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def schedule(self, data):
        """One pass over one request, in the way of vLLM's scheduler, on both managers."""
        requested = self.alive[data.draw(st.sampled_from(sorted(self.alive)))]
        accepted, rows = [], 0
        for index, feature in enumerate(requested.mm_features):
            if feature.identifier in {requested.mm_features[i].identifier for i in accepted}:
                continue
            hit = self.stock.check_and_update_cache(requested, index)
            assert self.ours.check_and_update_cache(requested, index) == hit
            if hit:
                continue
            fits = self.stock.can_allocate(requested, index, LOTS, rows)
            assert self.ours.can_allocate(requested, index, LOTS, rows) == fits
            if not fits:
                break
            accepted.append(index)
            rows += feature.mm_position.get_num_embeds()
        for index in accepted:
            self.stock.allocate(requested, index)
            self.ours.allocate(requested, index)
        assert self.ours.get_freed_mm_hashes() == self.stock.get_freed_mm_hashes()
        step = self.ours.get_manager_metadata()
        self.ours.end_pass({requested.request_id}, {requested.request_id: accepted})
        self.ours.acknowledge(step)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def reserve_and_be_preempted(self, data):
        """A pass that reserves an item whose request is then preempted: nothing is left of it."""
        requested = self.alive[data.draw(st.sampled_from(sorted(self.alive)))]
        feature = requested.mm_features[0]
        rows = feature.mm_position.get_num_embeds()
        if feature.identifier in self.stock.cached or not 0 < rows <= self.stock.num_free_slots:
            return
        assert self.ours.can_allocate(requested, 0, LOTS, 0)
        self.ours.allocate(requested, 0)
        # Preempted: vLLM frees every reference of the request.
        for index in sorted(self.stock.get_cached_input_ids(requested)):
            self.stock.free_encoder_input(requested, index)
        self.ours.free(requested)
        metadata = self.ours.get_manager_metadata()
        self.ours.end_pass(set(), {})
        self.ours.acknowledge(metadata)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def free_input(self, data):
        requested = self.alive[data.draw(st.sampled_from(sorted(self.alive)))]
        index = data.draw(st.integers(0, len(requested.mm_features) - 1))
        if index in self.stock.get_cached_input_ids(requested):
            self.stock.free_encoder_input(requested, index)
            self.ours.free_encoder_input(requested, index)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def finish(self, data):
        finished = self.alive.pop(data.draw(st.sampled_from(sorted(self.alive))))
        # The stock manager frees in the order of a set; the order in which items become evictable must be the same.
        for index in sorted(self.stock.get_cached_input_ids(finished)):
            self.stock.free_encoder_input(finished, index)
        self.ours.free(finished)

    @invariant()
    def agree(self):
        self.ours.check_integrity()
        assert {item.key for item in self.ours.pool.items()} == set(self.stock.cached)
        assert self.ours.pool.num_free_blocks == self.stock.num_free_slots
        for alive in self.alive.values():
            assert self.ours.get_cached_input_ids(alive) == self.stock.get_cached_input_ids(alive)


TestSameAsStock = SameAsStock.TestCase
TestSameAsStock.settings = settings(max_examples=100, stateful_step_count=40, deadline=None, derandomize=True)


def test_random_layouts_never_exceed_the_pool():
    generator = np.random.default_rng(0)
    for _ in range(300):
        frames = generator.integers(1, 12, generator.integers(1, 9)).tolist()
        mask = [flag for tokens in frames for flag in [True] * tokens + [False]]
        rows = sum(frames)
        cache = manager(num_item_blocks=-(-rows // 8), block_size=8)
        assert encode(cache, request("r", ("video", rows), masks={"video": mask})) == [0]


class Clock:
    """Seconds, moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def holding_manager(num_item_blocks: int, min_hold_ms: int) -> tuple[BlockEncoderCacheManager, Clock]:
    clock = Clock()
    geometry = CacheGeometry(num_item_blocks + 1, 4, 4)
    cache = BlockEncoderCacheManager(geometry, cache_size=num_item_blocks * 4, min_hold_ms=min_hold_ms, clock=clock)
    return cache, clock


def end(cache: BlockEncoderCacheManager, requested: Request) -> None:
    cache.free(requested)
    cache.check_integrity()


def test_blocks_of_an_evicted_item_wait_for_the_hold_time_and_then_come_free():
    cache, clock = holding_manager(2, min_hold_ms=100)
    first, second = request("first", ("a", 8)), request("second", ("b", 8))
    assert encode(cache, first) == [0]
    end(cache, first)
    assert encode(cache, second) == []  # evicts, and has to wait
    assert cache.pool.num_held_blocks == 2 and cache.stats.evictions == 0
    clock.now = 0.099
    assert encode(cache, second) == []
    clock.now = 0.100
    assert encode(cache, second) == [0]
    assert cache.stats.evictions == 1
    end(cache, second)


def test_a_hit_on_a_held_item_brings_it_back_and_workers_never_forgot_it():
    cache, clock = holding_manager(2, min_hold_ms=100)
    table = EntryTable(2, 4)
    first, second, again = request("first", ("a", 8)), request("second", ("b", 8)), request("again", ("a", 8))
    assert encode(cache, first, table) == [0]
    end(cache, first)
    generation = cache.pool.get("a").generation
    assert encode(cache, second, table) == []
    clock.now = 1.0
    assert encode(cache, again, table) == []
    assert cache.pool.get("a").references == {"again"}
    assert table.get("a").generation == generation
    assert encode(cache, second, table) == []  # the item is read again: nothing to evict
    end(cache, again)
    assert encode(cache, second, table) == []
    clock.now = 2.0
    assert encode(cache, second, table) == [0]
    assert table.get("a") is None and table.get("b") is not None
    end(cache, second)


def test_an_invalidated_item_leaves_its_readers_without_it_and_is_encoded_again():
    cache = manager(4)
    readers = [request("r", ("a", 8)), request("s", ("b", 4), ("a", 8))]
    assert [encode(cache, reader) for reader in readers] == [[0], [0]]
    cache.invalidate("a", 2, {reader.request_id: reader for reader in readers})
    cache.check_integrity()
    assert cache.pool.get("a") is None and cache.stats.invalidations == 1
    assert cache.get_cached_input_ids(readers[1]) == {0}
    assert [encode(cache, reader) for reader in readers] == [[0], []]
    for reader in readers:
        end(cache, reader)


def test_an_item_that_was_reserved_again_since_is_not_invalidated():
    cache = manager(2)
    first, other, again = request("first", ("a", 8)), request("other", ("b", 8)), request("again", ("a", 8))
    for requested in (first, other, again):
        assert encode(cache, requested) == [0]
        end(cache, requested)
    cache.invalidate("a", 2, {})
    assert cache.pool.get("a") is not None and cache.stats.invalidations == 0
    cache.invalidate("a", 3, {})
    assert cache.pool.get("a") is None
    cache.invalidate("a", 3, {})
    cache.check_integrity()


def test_a_rank_that_lacks_what_the_pool_has_is_found():
    from vllm_neuron_cache.encoder_cache.report import WorkerEntry
    from vllm_neuron_cache.errors import IntegrityError

    cache = manager(4)
    encode(cache, request("r", ("a", 8)))
    item = cache.pool.get("a")
    good = WorkerEntry("a", item.generation, item.block_ids, True)
    cache.check_integrity([[good], [good]])
    for bad in (
        good._replace(generation=item.generation + 1),
        good._replace(block_ids=(2, 3)),
        good._replace(written=False),
    ):
        with pytest.raises(IntegrityError, match="rank 1 lacks"):
            cache.check_integrity([[good], [bad]])

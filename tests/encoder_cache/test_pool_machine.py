"""The block pool under any sequence of calls, against a plain model of it."""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vllm_neuron_cache.encoder_cache.item import ItemLayout
from vllm_neuron_cache.encoder_cache.pool import EncoderBlockPool, ItemState
from vllm_neuron_cache.errors import PoolExhaustedError

keys = st.sampled_from("abcde")
requests = st.sampled_from(["r1", "r2", "r3"])
holders = st.sampled_from(["h1", "h2"])
layouts = st.lists(st.integers(1, 4), max_size=4).map(lambda tokens: ItemLayout(tuple(tokens)))

TICK_MS = 125  # times are whole eighths of a second, which floats add without error


@dataclass
class ModelItem:
    """What the model knows of an item. Its state follows from the rest. Times are in ticks."""

    generation: int
    layout: ItemLayout
    blocks: list[int]
    step: int
    written: bool
    references: set[str]
    leases: dict[str, int] = field(default_factory=dict)
    given_up: tuple[int, int] | None = None
    """When, and the last step that may read it."""

    @property
    def state(self) -> ItemState:
        if not self.written:
            return ItemState.RESERVED
        if self.given_up is not None:
            return ItemState.HELD
        return ItemState.RESIDENT if self.references or self.leases else ItemState.EVICTABLE

    def is_leased(self, now):
        return any(end > now for end in self.leases.values())


class PoolMachine(RuleBasedStateMachine):
    """Calls the pool as a scheduler and readers outside may, and keeps the model beside it.

    The model keeps a lease that ran out until the pool is told to look: then, and not before, the item changes state.
    """

    @initialize(num_blocks=st.integers(1, 8), hold=st.sampled_from([0, 1, 2]))
    def make_pool(self, num_blocks, hold):
        self.now = 8
        self.hold = hold
        self.pool = EncoderBlockPool(num_blocks, min_hold_ms=hold * TICK_MS, clock=lambda: self.now * TICK_MS / 1000)
        self.num_blocks = num_blocks
        self.free = list(range(num_blocks))
        self.items: dict[str, ModelItem] = {}
        self.order: list[str] = []  # evictable keys, next to go first
        self.given_up: list[tuple[str, ModelItem]] = []  # held items, with and without key, next to be free first
        self.leased: list[tuple[str, ModelItem]] = []  # in order of the first lease
        self.step = 1  # the pass that is being made
        self.acknowledged = 0
        self.generation = 0
        self.peak = 0

    def num_evictable(self):
        return sum(len(self.items[key].blocks) for key in self.order)

    def may_have_become_evictable(self, key, item):
        if item.state is ItemState.EVICTABLE:
            self.order.append(key)

    # Guards, as the model has them -----------------------------------------------------------------------------

    def is_guarded(self, item):
        since, last_step = item.given_up
        waits = self.hold > 0 and (self.now - since < self.hold or last_step > self.acknowledged)
        return waits or item.is_leased(self.now)

    def notice_the_time(self):
        """What leases that ran out leave behind."""
        for key, item in self.leased:
            item.leases = {holder: end for holder, end in item.leases.items() if end > self.now}
            if not item.leases:
                self.may_have_become_evictable(key, item)
        self.leased = [(key, item) for key, item in self.leased if item.leases]

    def free_what_is_unguarded(self):
        """Frees blocks, and returns (key, generation) of the items that still had their key."""
        gone = []
        for key, item in list(self.given_up):
            if not self.is_guarded(item):
                self.given_up.remove((key, item))
                self.free += item.blocks
                if self.items.get(key) is item:
                    del self.items[key]
                    gone.append((key, item.generation))
        return gone

    def give_up(self, key, item, last_step):
        item.given_up = self.now, last_step
        self.given_up.append((key, item))

    # Scheduler -------------------------------------------------------------------------------------------------

    @rule(key=keys, layout=layouts, request=requests)
    def reserve(self, key, layout, request):
        if key in self.items:
            with pytest.raises(ValueError):
                self.pool.reserve(key, layout, reference=request, step=self.step)
            return
        if layout.num_blocks > len(self.free):
            with pytest.raises(PoolExhaustedError):
                self.pool.reserve(key, layout, reference=request, step=self.step)
            return
        item = self.pool.reserve(key, layout, reference=request, step=self.step)
        blocks, self.free = self.free[: layout.num_blocks], self.free[layout.num_blocks :]
        self.generation += 1
        self.items[key] = ModelItem(self.generation, layout, blocks, self.step, False, {request})
        self.peak = max(self.peak, self.num_blocks - len(self.free))
        assert item is self.pool.get(key)

    @rule(key=keys, layout=layouts, request=requests)
    def reserve_write_and_release(self, key, layout, request):
        """What most items go through, so that many are there to be given up."""
        self.reserve(key=key, layout=layout, request=request)
        self.acknowledge_everything()
        self.release(key=key, request=request)

    @precondition(lambda self: self.order)
    @rule(in_flight=st.booleans(), data=st.data())
    def evict(self, in_flight, data):
        key = data.draw(st.sampled_from(self.order), label="evicted")
        last_step = self.step if in_flight else 0
        item = self.items[key]
        assert self.pool.evict(key, last_step=last_step).generation == item.generation
        self.order.remove(key)
        if self.hold:
            self.give_up(key, item, last_step)
        else:
            del self.items[key]
            self.free += item.blocks

    @rule(num_blocks=st.integers(0, 9), in_flight=st.booleans())
    def make_room(self, num_blocks, in_flight):
        last_step = self.step if in_flight else 0
        kept = [i for i in self.items.values() if i.references or not i.written or i.is_leased(self.now)]
        kept += [i for key, i in self.given_up if self.items.get(key) is not i and i.is_leased(self.now)]
        possible = num_blocks <= self.num_blocks - sum(len(item.blocks) for item in kept)
        assert self.pool.can_reserve(num_blocks) is possible
        if not possible:
            with pytest.raises(PoolExhaustedError):
                self.pool.make_room(num_blocks, last_step=last_step)
            return
        self.notice_the_time()
        gone = self.free_what_is_unguarded()
        coming = sum(len(item.blocks) for _, item in self.given_up if not item.is_leased(self.now))
        while len(self.free) + coming < num_blocks:
            key = self.order.pop(0)
            item = self.items[key]
            if self.hold:
                self.give_up(key, item, last_step)
                coming += len(item.blocks)
            else:
                del self.items[key]
                self.free += item.blocks
                gone.append((key, item.generation))
        freed = self.pool.make_room(num_blocks, last_step=last_step)
        assert [(item.key, item.generation) for item in freed] == gone
        if not self.hold:
            assert self.pool.num_free_blocks >= num_blocks

    @rule(key=keys, request=requests)
    def refer(self, key, request):
        if key not in self.items:
            with pytest.raises(KeyError):
                self.pool.refer(key, request)
            return
        item = self.items[key]
        assert self.pool.refer(key, request) is (request not in item.references)
        if key in self.order:
            self.order.remove(key)
        if item.given_up:
            self.given_up.remove((key, item))
            item.given_up = None
        item.references.add(request)

    @precondition(lambda self: any(item.given_up for item in self.items.values()))
    @rule(request=requests, data=st.data())
    def refer_to_a_held_item(self, request, data):
        held = [key for key, item in self.items.items() if item.given_up]
        self.refer(key=data.draw(st.sampled_from(held), label="held"), request=request)

    @rule(key=keys, request=requests)
    def release(self, key, request):
        self.pool.release(key, request)
        item = self.items.get(key)
        if item is not None and request in item.references:
            item.references.remove(request)
            self.may_have_become_evictable(key, item)

    @rule(request=requests)
    def release_all_of_one_request(self, request):
        for key in list(self.items):
            self.release(key=key, request=request)

    @rule(key=keys, in_flight=st.booleans())
    def invalidate(self, key, in_flight):
        item = self.items.get(key)
        last_step = self.step if in_flight else 0
        if item is None or item.references or not item.written:
            with pytest.raises(KeyError if item is None else ValueError):
                self.pool.invalidate(key, last_step=last_step)
            return
        assert self.pool.invalidate(key, last_step=last_step).generation == item.generation
        self.notice_the_time()
        del self.items[key]
        if key in self.order:
            self.order.remove(key)
        if not item.given_up:
            self.give_up(key, item, last_step)
        if not self.is_guarded(item):
            self.given_up.remove((key, item))
            self.free += item.blocks

    @rule(in_flight=st.booleans())
    def clear(self, in_flight):
        last_step = self.step if in_flight else 0
        self.pool.clear(last_step=last_step)
        self.notice_the_time()
        for key, item in self.items.items():
            if item.written and not item.given_up:
                item.references.clear()
                self.give_up(key, item, last_step)
        self.items.clear()
        self.order.clear()
        self.free_what_is_unguarded()
        held = [block for _, item in self.given_up for block in item.blocks]
        self.free = [block for block in range(self.num_blocks) if block not in held]

    @rule()
    def reclaim(self):
        self.notice_the_time()
        gone = self.free_what_is_unguarded()
        assert [(item.key, item.generation) for item in self.pool.reclaim()] == gone

    # Steps and time --------------------------------------------------------------------------------------------

    @rule()
    def end_pass(self):
        self.step += 1

    def written_up_to(self, step):
        self.acknowledged = max(self.acknowledged, step)
        for key, item in self.items.items():
            if not item.written and item.step <= step:
                item.written = True
                self.may_have_become_evictable(key, item)

    @precondition(lambda self: self.step > 1)
    @rule(data=st.data())
    def acknowledge(self, data):
        step = data.draw(st.integers(0, self.step - 1), label="acknowledged step")
        self.pool.acknowledge(step)
        self.written_up_to(step)

    @rule()
    def acknowledge_everything(self):
        self.end_pass()
        self.pool.acknowledge(self.step - 1)
        self.written_up_to(self.step - 1)

    @rule(ticks=st.integers(1, 4))
    def wait(self, ticks):
        self.now += ticks

    # Readers outside -------------------------------------------------------------------------------------------

    @rule(key=keys, holder=holders, ticks=st.integers(1, 6), data=st.data())
    def lease(self, key, holder, ticks, data):
        item = self.items.get(key)
        current = item.generation if item else self.generation
        generation = data.draw(st.sampled_from([current, current, current, current - 1]), label="of")
        granted = item is not None and item.written and generation == item.generation
        assert self.pool.lease(key, generation, holder, ticks * TICK_MS / 1000) is granted
        if granted:
            if not item.leases:
                self.leased.append((key, item))
            item.leases[holder] = max(self.now + ticks, item.leases.get(holder, 0))
            if key in self.order:
                self.order.remove(key)

    @precondition(lambda self: self.items)
    @rule(holder=holders, ticks=st.integers(1, 6), data=st.data())
    def lease_what_is_there(self, holder, ticks, data):
        key = data.draw(st.sampled_from(sorted(self.items)), label="key")
        self.lease(key=key, holder=holder, ticks=ticks, data=data)

    @precondition(lambda self: self.leased)
    @rule(holder=holders, other=st.sampled_from(["", "", "", "key", "generation"]), data=st.data())
    def end_lease(self, holder, other, data):
        """Of an item that may have lost its key; sometimes of another than the one that is leased."""
        key, item = data.draw(st.sampled_from(self.leased), label="item")
        self.pool.end_lease(
            "another" if other == "key" else key, item.generation + 99 * (other == "generation"), holder
        )
        if not other and item.leases.pop(holder, None) is not None and not item.leases:
            self.leased.remove((key, item))
            self.may_have_become_evictable(key, item)

    # After every operation -------------------------------------------------------------------------------------

    @invariant()
    def the_pool_agrees_with_itself(self):
        self.pool.check_integrity()

    @invariant()
    def the_pool_agrees_with_the_model(self):
        pool = self.pool
        seen = {}
        for item in pool.items():
            blocks = list(item.block_ids)
            seen[item.key] = (item.generation, item.layout, blocks, item.reserved_in, item.state, item.references)
        assert seen == {
            key: (item.generation, item.layout, item.blocks, item.step, item.state, item.references)
            for key, item in self.items.items()
        }
        assert all(pool.get(key) is None for key in "abcde" if key not in self.items)
        for key, item in self.items.items():
            assert pool.get(key).leases == {holder: end * TICK_MS / 1000 for holder, end in item.leases.items()}
        assert [(item.generation, item.hold) for item in pool._held] == [
            (item.generation, (item.given_up[0] * TICK_MS / 1000, item.given_up[1])) for _, item in self.given_up
        ]
        assert pool.num_free_blocks == len(self.free)
        assert pool.num_used_blocks == self.num_blocks - len(self.free)
        assert pool.num_evictable_blocks == self.num_evictable()
        assert pool.num_held_blocks == sum(len(item.blocks) for _, item in self.given_up)
        assert pool.peak_used_blocks == self.peak

    @invariant()
    def no_block_that_someone_may_read_is_free(self):
        for _, item in [*self.leased, *self.given_up]:
            if item.is_leased(self.now) or (item.given_up and self.is_guarded(item)):
                assert not set(item.blocks) & set(self.pool._free_blocks)

    def teardown(self):
        """Once no request needs anything, time and acknowledgements alone bring every block back."""
        if not hasattr(self, "pool"):
            return
        for request in ("r1", "r2", "r3"):
            self.release_all_of_one_request(request=request)
        for in_flight in (True, False):
            self.acknowledge_everything()
            self.wait(ticks=100)
            self.make_room(num_blocks=self.num_blocks, in_flight=in_flight)
        assert self.pool.num_free_blocks == self.num_blocks and self.pool.num_held_blocks == 0


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=300)

"""The block pool under any sequence of calls, against a plain model of it."""

from dataclasses import dataclass

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vllm_neuron_cache.encoder_cache.item import ItemLayout
from vllm_neuron_cache.encoder_cache.pool import EncoderBlockPool, ItemState
from vllm_neuron_cache.errors import PoolExhaustedError

keys = st.sampled_from("abcdef")
requests = st.sampled_from(["r1", "r2", "r3"])
layouts = st.lists(st.integers(1, 4), max_size=4).map(lambda tokens: ItemLayout(tuple(tokens)))


@dataclass
class ModelItem:
    """What the model knows of an item. Its state follows from `written` and `references`."""

    generation: int
    layout: ItemLayout
    blocks: list[int]
    step: int
    written: bool
    references: set[str]

    @property
    def state(self) -> ItemState:
        if not self.written:
            return ItemState.RESERVED
        return ItemState.RESIDENT if self.references else ItemState.EVICTABLE


class PoolMachine(RuleBasedStateMachine):
    """Calls the pool as a scheduler may, and keeps the model beside it."""

    @initialize(num_blocks=st.integers(1, 8))
    def make_pool(self, num_blocks):
        self.pool = EncoderBlockPool(num_blocks)
        self.num_blocks = num_blocks
        self.free = list(range(num_blocks))
        self.items: dict[str, ModelItem] = {}
        self.order: list[str] = []  # evictable keys, next to go first
        self.step = 1  # the pass that is being made
        self.generation = 0
        self.peak = 0

    def num_evictable(self):
        return sum(len(self.items[key].blocks) for key in self.order)

    def becomes_evictable(self, key):
        if self.items[key].state is ItemState.EVICTABLE:
            self.order.append(key)

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

    @rule(num_blocks=st.integers(0, 9))
    def make_room(self, num_blocks):
        possible = num_blocks <= len(self.free) + self.num_evictable()
        assert self.pool.can_reserve(num_blocks) is possible
        if not possible:
            with pytest.raises(PoolExhaustedError):
                self.pool.make_room(num_blocks)
            return
        evicted = []
        while len(self.free) < num_blocks:
            key = self.order.pop(0)
            item = self.items.pop(key)
            self.free += item.blocks
            evicted.append((key, item.generation))
        assert [(item.key, item.generation) for item in self.pool.make_room(num_blocks)] == evicted

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
        item.references.add(request)

    @rule(key=keys, request=requests)
    def release(self, key, request):
        self.pool.release(key, request)
        item = self.items.get(key)
        if item is not None and request in item.references:
            item.references.remove(request)
            self.becomes_evictable(key)

    @rule(request=requests)
    def release_all_of_one_request(self, request):
        for key in list(self.items):
            self.release(key=key, request=request)

    @rule()
    def end_pass(self):
        self.step += 1

    @precondition(lambda self: self.step > 1)
    @rule(data=st.data())
    def acknowledge(self, data):
        step = data.draw(st.integers(0, self.step - 1), label="acknowledged step")
        self.pool.acknowledge(step)
        for key, item in self.items.items():
            if not item.written and item.step <= step:
                item.written = True
                self.becomes_evictable(key)

    @rule()
    def acknowledge_everything(self):
        self.end_pass()
        self.pool.acknowledge(self.step - 1)
        for key, item in self.items.items():
            if not item.written:
                item.written = True
                self.becomes_evictable(key)

    @rule()
    def clear(self):
        self.pool.clear()
        self.items.clear()
        self.order.clear()
        self.free = list(range(self.num_blocks))

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
        assert all(pool.get(key) is None for key in "abcdef" if key not in self.items)
        assert pool.num_free_blocks == len(self.free)
        assert pool.num_used_blocks == self.num_blocks - len(self.free)
        assert pool.num_evictable_blocks == self.num_evictable()
        assert pool.peak_used_blocks == self.peak


TestPoolMachine = PoolMachine.TestCase

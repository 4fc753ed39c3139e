"""Which item goes first: each policy against the plainest form of its rule, and both behind one interface."""

import dataclasses
import random
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pools import evictable, layout, reserve

from vllm_neuron_cache.config import EVICTION_POLICIES
from vllm_neuron_cache.encoder_cache.eviction import POLICIES, GreedyDualSizeFrequency, LeastRecentlyUsed
from vllm_neuron_cache.encoder_cache.item import ItemLayout
from vllm_neuron_cache.encoder_cache.pool import EncoderBlockPool, ItemState, PoolItem
from vllm_neuron_cache.errors import IntegrityError


def item(key, *, generation, rows=(4,), uses=1):
    return PoolItem(
        key=key,
        generation=generation,
        layout=ItemLayout(tuple(rows)),
        block_ids=tuple(range(len(rows))),
        state=ItemState.EVICTABLE,
        num_tokens=sum(rows),
        reserved_in=1,
        num_uses=uses,
    )


def order(policy):
    """Keys as they are evicted. Empties the policy."""
    return [policy.evict().key for _ in range(len(policy))]


@pytest.fixture(params=sorted(POLICIES))
def policy(request):
    return POLICIES[request.param]()


def test_the_configuration_names_the_policies_that_there_are():
    assert set(EVICTION_POLICIES) == set(POLICIES)


def test_items_that_differ_in_nothing_go_in_the_order_in_which_they_came(policy):
    for generation, key in enumerate("bcad", 1):
        policy.add(item(key, generation=generation))
    assert [i.key for i in policy] == list("bcad") and len(policy) == policy.num_blocks == 4
    assert order(policy) == list("bcad") and len(policy) == policy.num_blocks == 0


def test_an_item_that_is_needed_again_does_not_go(policy):
    items = [item(key, generation=g, rows=(4, 4)) for g, key in enumerate("abc", 1)]
    for i in items:
        policy.add(i)
    policy.remove(items[0])
    assert policy.num_blocks == 4
    policy.add(items[0])
    policy.remove(items[1])
    assert order(policy) == ["c", "a"]


def test_what_is_not_here_cannot_go(policy):
    with pytest.raises(KeyError):
        policy.evict()
    with pytest.raises(KeyError):
        policy.remove(item("a", generation=1))


def test_cleared_means_empty(policy):
    policy.add(item("a", generation=1))
    policy.clear()
    assert len(policy) == policy.num_blocks == 0 and list(policy) == []
    policy.check_integrity([])


def test_gdsf_keeps_what_is_used_often():
    policy = GreedyDualSizeFrequency()
    policy.add(item("often", generation=1, uses=3))
    policy.add(item("once", generation=2))
    policy.add(item("twice", generation=3, uses=2))
    assert order(policy) == ["once", "twice", "often"]


def test_gdsf_gives_up_first_what_wastes_its_blocks():
    policy = GreedyDualSizeFrequency()
    policy.add(item("full", generation=1, rows=(512, 512)))
    policy.add(item("nearly empty", generation=2, rows=(80,)))
    policy.add(item("half full", generation=3, rows=(512, 16)))
    assert order(policy) == ["nearly empty", "half full", "full"]


def test_gdsf_forgets_old_worth():
    """What was used fifty times and never again goes before what is used twice, after enough evictions."""
    policy = GreedyDualSizeFrequency()
    policy.add(item("old", generation=1, rows=(10,), uses=50))
    for generation in range(2, 400):
        policy.add(item(f"young {generation}", generation=generation, rows=(10,), uses=2))
        if policy.evict().key == "old":
            return
    pytest.fail("it stays for ever")


def test_gdsf_does_not_grow_by_items_that_come_and_go():
    policy = GreedyDualSizeFrequency()
    kept = item("kept", generation=1)
    policy.add(kept)
    for _ in range(10_000):
        policy.remove(kept)
        policy.add(kept)
    assert len(policy._heap) < 200 and order(policy) == ["kept"]


class NaiveGdsf:
    """The rule of the paper, with a search over everything."""

    def __init__(self):
        self.inflation, self.entries = 0.0, {}

    def add(self, i):
        worth = i.num_uses * i.layout.num_tokens / len(i.block_ids)
        self.entries.pop(i.generation, None)
        self.entries[i.generation] = (self.inflation + worth, i)

    def remove(self, i):
        del self.entries[i.generation]

    def evict(self):
        self.inflation, victim = min(self.entries.values(), key=lambda entry: entry[0])
        del self.entries[victim.generation]
        return victim


class NaiveLru:
    def __init__(self):
        self.entries = OrderedDict()

    def add(self, i):
        self.entries[i.generation] = i

    def remove(self, i):
        del self.entries[i.generation]

    def evict(self):
        return self.entries.popitem(last=False)[1]


@pytest.mark.parametrize("made, naive", [(LeastRecentlyUsed, NaiveLru), (GreedyDualSizeFrequency, NaiveGdsf)])
@given(seed=st.integers(0, 1 << 32))
def test_any_sequence_of_calls_gives_the_order_of_the_plainest_form(made, naive, seed):
    choose = random.Random(seed)
    policy, model = made(), naive()
    here: dict[int, PoolItem] = {}
    away: list[PoolItem] = [
        item(str(g), generation=g, rows=[choose.randint(1, 4) for _ in range(choose.randint(1, 3))]) for g in range(12)
    ]
    for _ in range(80):
        if away and choose.random() < 0.5:
            i = away.pop(choose.randrange(len(away)))
            i.num_uses += choose.randint(0, 2)
            here[i.generation] = i
            policy.add(i), model.add(i)
        elif here:
            if choose.random() < 0.5:
                i = here.pop(choose.choice(list(here)))
                policy.remove(i), model.remove(i)
            else:
                i = policy.evict()
                assert i is model.evict()
                del here[i.generation]
            away.append(i)
        policy.check_integrity(list(here.values()))


@pytest.mark.parametrize("made", POLICIES.values())
def test_two_records_that_differ_are_noticed(made):
    policy = made()
    policy.add(item("a", generation=1))
    with pytest.raises(IntegrityError, match=r"\['b'\].*\['a'\]"):
        policy.check_integrity([item("b", generation=2)])
    policy.num_blocks = 7
    with pytest.raises(IntegrityError, match="1 in items, 7 counted"):
        policy.check_integrity(list(policy))


# In the pool ---------------------------------------------------------------------------------------------------


def test_a_pool_evicts_by_its_policy():
    pool = EncoderBlockPool(3, policy=GreedyDualSizeFrequency())
    for key in "abc":
        evictable(pool, key)
    pool.refer("a", "other")
    pool.release("a", "other")
    assert [i.key for i in pool.make_room(2)] == ["b", "c"]
    assert pool.get("a").num_uses == 2
    pool.check_integrity()


def test_a_hit_on_an_item_that_waits_for_nothing_takes_it_out_of_the_order():
    pool = EncoderBlockPool(2, policy=GreedyDualSizeFrequency())
    evictable(pool, "a"), evictable(pool, "b")
    pool.refer("a", "r")
    assert [i.key for i in pool.make_room(1)] == ["b"]
    assert not pool.can_reserve(2)
    pool.check_integrity()


def test_uses_are_counted_by_request_and_lost_with_the_item():
    pool = EncoderBlockPool(1)
    reserve(pool, "a")
    pool.refer("a", "r2")
    pool.refer("a", "r2")
    assert pool.get("a").num_uses == 2
    pool.acknowledge(1)
    pool.release("a", "r"), pool.release("a", "r2")
    pool.evict("a")
    assert pool.reserve("a", layout(1), reference="r", step=2).num_uses == 1


def test_an_item_is_compared_by_its_generation_alone():
    """Records of two pools, or an old record, may be equal in everything else."""
    policy = LeastRecentlyUsed()
    first = item("a", generation=1)
    policy.add(first)
    with pytest.raises(KeyError):
        policy.remove(dataclasses.replace(first, generation=2))

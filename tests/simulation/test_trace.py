"""Traces are what they say: the share of repeats, the sizes, and the same every time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_neuron_cache.simulation.trace import (
    TraceItem,
    TraceRequest,
    one_item_requests,
    random_requests,
    repeating_items,
)


def repeats(items):
    return len(items) - len({item.key for item in items})


@pytest.mark.parametrize("reuse", [0.0, 0.3, 0.9])
def test_the_share_of_repeats_is_the_one_asked_for(reuse):
    items = repeating_items((10, 20), 4000, reuse=reuse, seed=1)
    assert repeats(items) / len(items) == pytest.approx(reuse, abs=0.03)
    assert {item.num_tokens for item in items} == {10, 20}


def test_everything_is_a_repeat_but_the_first():
    assert repeats(repeating_items((5,), 50, reuse=1.0)) == 49


def test_an_item_has_one_size():
    sizes = {}
    for item in repeating_items(range(1, 100), 500, reuse=0.8, seed=2):
        assert sizes.setdefault(item.key, item.num_tokens) == item.num_tokens


def test_repeats_are_recent_ones_the_more_so_the_larger_the_exponent():
    def mean_distance(zipf):
        last, distances = {}, []
        for index, item in enumerate(repeating_items((5,), 3000, reuse=0.5, zipf=zipf, seed=3)):
            if item.key in last:
                distances.append(index - last[item.key])
            last[item.key] = index
        return sum(distances) / len(distances)

    assert mean_distance(2.0) < mean_distance(1.0) < mean_distance(0.0)


def test_the_same_arguments_give_the_same_trace():
    def trace(seed):
        items = repeating_items((5, 7), 100, reuse=0.5, seed=seed)
        return random_requests(items, num_requests=20, max_items=3, seed=seed)

    assert trace(4) == trace(4) != trace(5)


@given(seed=st.integers(0, 10**6), count=st.integers(0, 40), every=st.integers(0, 5))
def test_requests_arrive_in_order_and_have_text_around_every_item(seed, count, every):
    items = repeating_items((5, 7), 10, reuse=0.5, seed=seed)
    requests = random_requests(items, num_requests=count, max_items=3, seed=seed, every=every)
    assert len({request.request_id for request in requests}) == count
    assert [request.arrival for request in requests] == sorted(request.arrival for request in requests)
    for request in requests:
        assert len(request.text_tokens) == len(request.items) + 1 and min(request.text_tokens) >= 1
        assert 0 <= request.shared_prefix <= len(request.items) and request.max_tokens >= 1


def test_a_prompt_has_its_items_its_text_and_what_separates_frames():
    video = TraceItem("v", 30, "video", (10, 10, 10))
    assert TraceRequest("r", 0, (TraceItem("i", 5), video), (3, 4, 6)).num_prompt_tokens == 13 + 5 + 30 + 2


def test_so_many_arrive_before_each_pass():
    requests = one_item_requests(repeating_items((5,), 5, reuse=0), per_pass=2)
    assert [request.arrival for request in requests] == [0, 0, 1, 1, 2]

"""The reference that predicts encoder runs, by hand-worked examples."""

import pytest

from vllm_neuron_cache.demo.reference import (
    ReferenceItem,
    num_reference_blocks,
    placeholder_items,
    reference_encoder_runs,
)

IMAGE, VIDEO = 7, 8


def test_items_are_found_by_their_runs():
    prompt = [1, 7, 7, 7, 2, 7, 3, 8, 8, 4, 8, 8, 5]
    items = placeholder_items(["a", "b", "clip"], prompt, image_token=IMAGE, video_token=VIDEO)
    assert items == [ReferenceItem("a", (3,)), ReferenceItem("b", (1,)), ReferenceItem("clip", (2, 2))]


def test_items_and_names_must_match():
    with pytest.raises(ValueError, match="1 items and 2 names"):
        placeholder_items(["a", "b"], [7, 7], image_token=IMAGE, video_token=VIDEO)


@pytest.mark.parametrize(
    ("runs", "blocks"), [((8,), 1), ((9,), 2), ((3, 3, 3), 2), ((5, 5, 5), 3), ((4, 4, 4), 2), ((9, 2), 2)]
)
def test_blocks_of_an_item(runs, blocks):
    assert num_reference_blocks(runs, 8) == blocks


def test_least_recently_used_goes_first():
    a, b, c = (ReferenceItem(name, (8,)) for name in "abc")
    assert reference_encoder_runs([[a], [b], [a], [c], [a], [b]], num_blocks=2, block_size=8) == [1, 1, 0, 1, 0, 1]


def test_a_request_never_evicts_its_own_items():
    a, b, c = (ReferenceItem(name, (8,)) for name in "abc")
    assert reference_encoder_runs([[a], [b, c], [b, c, b]], num_blocks=2, block_size=8) == [1, 2, 0]

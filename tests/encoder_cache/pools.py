"""Items in each state, for the tests of the pool."""

import pytest

from vllm_neuron_cache.encoder_cache.item import ItemLayout
from vllm_neuron_cache.errors import IntegrityError


def layout(num_blocks, rows=4):
    return ItemLayout((rows,) * num_blocks)


def reserve(pool, key, num_blocks=1, *, reference="r", step=1):
    return pool.reserve(key, layout(num_blocks), reference=reference, step=step)


def resident(pool, key, num_blocks=1, *, reference="r"):
    item = reserve(pool, key, num_blocks, reference=reference)
    pool.acknowledge(1)
    return item


def evictable(pool, key, num_blocks=1):
    item = resident(pool, key, num_blocks)
    pool.release(key, "r")
    return item


def assert_both_sides_are_printed(pool, sides):
    """The pool's records disagree, and the message of its check has each of `sides`."""
    with pytest.raises(IntegrityError) as caught:
        pool.check_integrity()
    for side in sides:
        assert side in str(caught.value)

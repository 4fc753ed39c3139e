"""Ranges of indices: no value outside them, and no wider than they have to be."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_neuron_cache.graphs.index_range import ANYTHING, IndexRange, index_ranges
from vllm_neuron_cache.graphs.tracing import trace_graph

INT32 = torch.int32
LENGTH = 4


def range_of(fn: Callable[..., torch.Tensor], *limits: tuple[int, int], dtype: torch.dtype = INT32) -> IndexRange:
    """The range of `fn`'s result, for vectors with values in these limits, both included."""
    args = tuple(torch.empty(LENGTH, dtype=dtype, device="meta") for _ in limits)
    graph = trace_graph("expression", fn, args).graph
    placeholders = [node.name for node in graph.nodes if node.op == "placeholder"]
    known = {name: IndexRange(*limit) for name, limit in zip(placeholders, limits, strict=True)}
    (output,) = (node for node in graph.nodes if node.op == "output")
    return index_ranges(graph, known)[output.args[0][0]]


def assert_within(values: torch.Tensor, bounds: IndexRange) -> None:
    assert bounds.low <= values.min().item() and values.max().item() <= bounds.high, (values, bounds)


# Random expressions ------------------------------------------------------------------------------------------------


def same_length(*vectors: torch.Tensor) -> list[torch.Tensor]:
    length = min(len(vector) for vector in vectors)
    return [vector[:length] if len(vector) > length else vector for vector in vectors]


ONE = {
    "plus": lambda x, k: x + k,
    "minus": lambda x, k: x - k,
    "from": lambda x, k: k - x,
    "from twice": lambda x, k: torch.rsub(x, k, alpha=2),
    "times": lambda x, k: x * k,
    "at least": lambda x, k: x.clamp(min=k),
    "at most": lambda x, k: x.clamp(max=k),
    "between": lambda x, k: x.clamp(k, k + 3),
    "full": lambda x, k: torch.full_like(x, k),
    "arange": lambda x, k: x + torch.arange(k % 100, k % 100 + 3 * len(x), 3, dtype=INT32, device=x.device),
    "arange down": lambda x, k: torch.arange(k % 100, k % 100 - 2 * len(x), -2, dtype=INT32, device=x.device),
    "view": lambda x, k: x.view(1, -1).transpose(0, 1).flatten(),
    "select": lambda x, k: x.select(0, k % len(x)).expand(3),
    "slice": lambda x, k: x[k % len(x) :],
    "flip": lambda x, k: x.flip(0).repeat(2),
    "int64": lambda x, k: (x.long() * k).int(),
    "uint8": lambda x, k: (x.to(torch.uint8) + k % 256).int(),
    "bool": lambda x, k: x.bool().int() + k,
    "compared": lambda x, k: (x > k).int(),
    "bfloat16": lambda x, k: x.bfloat16().int(),
    "bits": lambda x, k: x.view(torch.int16).int(),
    "in place": lambda x, k: x.clone().add_(k),
}
TWO = {
    "sum": lambda x, y: x + y,
    "sum of three": lambda x, y: torch.add(x, y, alpha=2),
    "difference": lambda x, y: torch.sub(x, y, alpha=-3),
    "product": lambda x, y: x * y,
    "larger": torch.maximum,
    "smaller": torch.minimum,
    "where": lambda x, y: torch.where(x > y, x, y * 2),
    "cat": lambda x, y: torch.cat([x, y]),
    "stack": lambda x, y: torch.stack([x, y]).flatten(),
    "between two": lambda x, y: torch.clamp(x, y, y + 5),
    "put": lambda x, y: x.index_put((torch.zeros_like(y),), y),
    "accumulate": lambda x, y: x.index_put((torch.zeros_like(y),), y, accumulate=True),
}
CONSTANTS = st.one_of(st.integers(-6, 6), st.sampled_from([-(2**30), 2**20, 2**30, 300, -129]))
EXPRESSIONS = st.recursive(
    st.sampled_from([0, 1]),
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(sorted(ONE)), inner, CONSTANTS), st.tuples(st.sampled_from(sorted(TWO)), inner, inner)
    ),
    max_leaves=6,
)


def evaluated(expression, args: tuple[torch.Tensor, ...]) -> torch.Tensor:
    if isinstance(expression, int):
        return args[expression]
    name, first, second = expression
    x = evaluated(first, args)
    return ONE[name](x, second) if name in ONE else TWO[name](*same_length(x, evaluated(second, args)))


LIMITS = st.tuples(st.integers(-9, 300), st.integers(0, 9)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(expression=EXPRESSIONS, limits=st.tuples(LIMITS, LIMITS), seed=st.integers(0, 2**16))
def test_no_value_of_a_random_expression_is_outside_its_range(expression, limits, seed):
    bounds = range_of(lambda a, b: evaluated(expression, (a, b)), *limits)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(5):
        args = tuple(torch.randint(low, high + 1, (LENGTH,), dtype=INT32, generator=generator) for low, high in limits)
        assert_within(evaluated(expression, args), bounds)
    for corner in range(4):
        ends = (limits[0][corner & 1], limits[1][corner >> 1])
        assert_within(evaluated(expression, tuple(torch.full((LENGTH,), end, dtype=INT32) for end in ends)), bounds)


# Examples ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fn", "low", "high"),
    [
        (lambda x: x, 0, 7),
        (lambda x: x + 3, 3, 10),
        (lambda x: torch.add(x, x, alpha=3), 0, 28),
        (lambda x: x - 3, -3, 4),
        (lambda x: 3 - x, -4, 3),
        (lambda x: torch.rsub(x, 3, alpha=2), -11, 3),
        (lambda x: x * -2, -14, 0),
        (lambda x: (x - 3) * (x - 3), -12, 16),
        (lambda x: x.clamp(2, 5), 2, 5),
        (lambda x: x.clamp(min=2), 2, 7),
        (lambda x: x.clamp(max=5), 0, 5),
        (lambda x: x.clamp(5, 2), 2, 2),
        (lambda x: torch.minimum(x, torch.full_like(x, 4)), 0, 4),
        (lambda x: torch.maximum(x, torch.full_like(x, 4)), 4, 7),
        (lambda x: torch.where(x > 4, x, 20), 0, 20),
        (lambda x: torch.cat([x, x - 9]), -9, 7),
        (lambda x: torch.stack([x, x + 1]).flatten()[1:].view(-1, 1), 0, 8),
        (lambda x: torch.arange(0, 10, 3, dtype=INT32, device=x.device), 0, 9),
        (lambda x: torch.arange(10, 0, -3, dtype=INT32, device=x.device), 1, 10),
        (lambda x: torch.zeros_like(x) + torch.ones_like(x), 1, 1),
        (lambda x: x.new_full((3,), 7), 7, 7),
        (lambda x: torch.zeros_like(x).index_put((x,), x + 2), 0, 9),
        (lambda x: (x + 20)[x], 20, 27),
        (lambda x: x.long().int(), 0, 7),
        (lambda x: (x > 3).int(), 0, 1),
    ],
)
def test_ranges_are_exact_where_the_values_are_independent(fn, low, high):
    assert range_of(fn, (0, 7)) == (low, high)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x // x,
        lambda x: x % x,
        lambda x: x.neg(),
        lambda x: x.cumsum(0),
        lambda x: torch.empty_like(x),
        lambda x: x[: len(x) // 2].bitwise_and(3),
    ],
)
def test_an_operator_that_is_not_known_has_no_bounds(fn):
    assert range_of(fn, (0, 7)) == ANYTHING
    assert range_of(lambda x: fn(x).int() + 1, (0, 7)) == ANYTHING


def test_an_argument_without_a_limit_has_no_bounds():
    assert range_of(lambda x: x + 1, (-math.inf, math.inf)) == ANYTHING
    assert range_of(lambda x: x.clamp(0, 3), (-math.inf, math.inf)) == (0, 3)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x * 2**29,
        lambda x: x + (2**31 - 7),
        lambda x: x * 2**30 * 4,
        lambda x: (x.long() * 2**30).int(),
        lambda x: x.to(torch.uint8) - 1,
    ],
)
def test_a_result_that_does_not_fit_its_type_loses_its_bounds(fn):
    assert range_of(fn, (0, 7)) == ANYTHING


def test_a_result_that_just_fits_keeps_its_bounds():
    assert range_of(lambda x: x + (2**31 - 8), (0, 7)) == (2**31 - 8, 2**31 - 1)
    assert range_of(lambda x: x.long() * 2**30, (0, 7)) == (0, 7 * 2**30)


@pytest.mark.parametrize(
    ("fn", "values"),
    [
        (lambda x: x.bool().int(), (3, 5)),
        (lambda x: (x.bool() + x.bool()).int(), (3, 5)),
        (lambda x: x.bfloat16().int(), (257, 259)),
        (lambda x: x.float().int(), (16_777_217, 16_777_219)),
        (lambda x: (x * 0.5).int(), (1, 3)),
        (lambda x: (x / 0 * 0).nan_to_num(-7).int(), (0, 0)),
        (lambda x: torch.zeros_like(x).copy_(x * 0.5), (1, 3)),
        (lambda x: torch.full((2,), 2.7, dtype=INT32, device=x.device), (0, 0)),
        (lambda x: torch.full((2,), 1.0, device=x.device).view(INT32), (0, 0)),
        (lambda x: x.view(torch.int16).int(), (40_000, 40_001)),
        (lambda x: torch.rsub(x, 5, alpha=2), (1, 4)),
        (lambda x: torch.zeros_like(x).index_put((x,), x, accumulate=True), (3, 3)),
        (lambda x: torch.minimum(x, torch.full((), 2**32 - 5, dtype=torch.int64, device=x.device)), (1, 4)),
    ],
)
def test_conversions_and_accumulation_stay_within_the_range(fn, values):
    low, high = values
    bounds = range_of(fn, values)
    for vector in ([low] * LENGTH, [high] * LENGTH, [low, high, low, high]):
        assert_within(fn(torch.tensor(vector, dtype=INT32)), bounds)


def test_a_range_reads_as_numbers():
    assert str(IndexRange(0, 7)) == "0 to 7"
    assert str(ANYTHING) == "-inf to inf"
    assert IndexRange(0, 2).union(IndexRange(-1, 1)) == (-1, 2)

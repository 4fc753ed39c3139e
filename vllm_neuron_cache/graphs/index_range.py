"""Which values an integer tensor of a graph can have, so that an index out of range is found without running it.

Interval arithmetic over the nodes, in the order of the graph. What is not known here has no bounds, and an index
without bounds cannot be shown to be in range.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch


class IndexRange(NamedTuple):
    """Smallest and largest value, both included."""

    low: float
    high: float

    def union(self, other: "IndexRange") -> "IndexRange":
        return IndexRange(min(self.low, other.low), max(self.high, other.high))

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}"


ANYTHING = IndexRange(-math.inf, math.inf)


def index_ranges(graph: torch.fx.Graph, known: Mapping[str, IndexRange]) -> dict[torch.fx.Node, IndexRange]:
    """The range of every node; `known` has those of placeholders, by node name."""
    ranges: dict[torch.fx.Node, IndexRange] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            ranges[node] = known.get(node.name, ANYTHING)
        elif node.op == "call_function":
            rule, dtype = _RULES.get(operator_name(node.target)), getattr(node.meta.get("val"), "dtype", None)
            # Operands are converted to the type of the result first.
            of = functools.partial(_range_of, ranges=ranges, dtype=dtype)
            ranges[node] = _held(rule(node, of) if rule else ANYTHING, dtype)
        else:
            ranges[node] = ANYTHING
    return ranges


def _held(values: IndexRange, dtype: torch.dtype | None) -> IndexRange:
    """What becomes of these values in a tensor of this type. A sum that does not fit into int32 comes out as any other
    number. Floating point rounds and has NaN, so that nothing is known of it."""
    if dtype is torch.bool:
        return IndexRange(0, 1)
    if dtype is None or dtype.is_floating_point or dtype.is_complex:
        return ANYTHING
    limits = torch.iinfo(dtype)
    if not (limits.min <= values.low and values.high <= limits.max):
        return ANYTHING
    return IndexRange(math.floor(values.low), math.ceil(values.high))


def operator_name(target: Any) -> str:
    """`aten.add` for the operator `aten.add.Tensor`."""
    return ".".join(str(target).split(".")[:2])


def _range_of(value: Any, ranges: Mapping[torch.fx.Node, IndexRange], dtype: torch.dtype | None) -> IndexRange:
    if isinstance(value, torch.fx.Node):
        return _held(ranges[value], dtype)
    if isinstance(value, int | float):
        return _held(IndexRange(value, value), dtype)
    return ANYTHING


_Lookup = Callable[[Any], IndexRange]


def _same(node: torch.fx.Node, of: _Lookup) -> IndexRange:
    return of(node.args[0])


def _add(node: torch.fx.Node, of: _Lookup) -> IndexRange:
    a, b = of(node.args[0]), _scaled(of(node.args[1]), node)
    return IndexRange(a.low + b.low, a.high + b.high)


def _sub(node: torch.fx.Node, of: _Lookup) -> IndexRange:
    return _minus(of(node.args[0]), _scaled(of(node.args[1]), node))


def _rsub(node: torch.fx.Node, of: _Lookup) -> IndexRange:
    return _minus(of(node.args[1]), _scaled(of(node.args[0]), node))


def _minus(a: IndexRange, b: IndexRange) -> IndexRange:
    return IndexRange(a.low - b.high, a.high - b.low)


def _scaled(a: IndexRange, node: torch.fx.Node) -> IndexRange:
    alpha = _argument(node, 2, "alpha", 1)
    return a if alpha == 1 else _product(a, IndexRange(alpha, alpha))


def _mul(node: torch.fx.Node, of: _Lookup) -> IndexRange:
    return _product(of(node.args[0]), of(node.args[1]))


def _product(a: IndexRange, b: IndexRange) -> IndexRange:
    # 0 * inf is no number, and 0 here.
    corners = [0 if 0 in (x, y) else x * y for x in a for y in b]
    return IndexRange(min(corners), max(corners))


def _clamp(node: torch.fx.Node, of: _Lookup) -> IndexRange:
    value, low, high = of(node.args[0]), _argument(node, 1, "min"), _argument(node, 2, "max")
    return _limited(value, None if low is None else of(low), None if high is None else of(high))


def _at_least(node: torch.fx.Node, of: _Lookup) -> IndexRange:
    return _limited(of(node.args[0]), of(node.args[1]), None)


def _at_most(node: torch.fx.Node, of: _Lookup) -> IndexRange:
    return _limited(of(node.args[0]), None, of(node.args[1]))


def _limited(value: IndexRange, low: IndexRange | None, high: IndexRange | None) -> IndexRange:
    if low is not None:
        value = IndexRange(max(value.low, low.low), max(value.high, low.high))
    if high is not None:
        value = IndexRange(min(value.low, high.low), min(value.high, high.high))
    return value


def _floor_divide(node: torch.fx.Node, of: _Lookup) -> IndexRange:
    value, divisor = of(node.args[0]), of(node.args[1])
    if divisor.low != divisor.high or divisor.low <= 0 or math.isinf(value.low + value.high):
        return ANYTHING
    return IndexRange(value.low // divisor.low, value.high // divisor.low)


def _div(node: torch.fx.Node, of: _Lookup) -> IndexRange:
    return _floor_divide(node, of) if node.kwargs.get("rounding_mode") == "floor" else ANYTHING


def _remainder(node: torch.fx.Node, of: _Lookup) -> IndexRange:
    """With the sign of the divisor, as Python's."""
    divisor = of(node.args[1])
    return IndexRange(0, divisor.low - 1) if 0 < divisor.low == divisor.high else ANYTHING


def _where(node: torch.fx.Node, of: _Lookup) -> IndexRange:
    return of(node.args[1]).union(of(node.args[2]))


def _first_of_list(node: torch.fx.Node, of: _Lookup) -> IndexRange:
    first, *others = map(of, node.args[0])
    for other in others:
        first = first.union(other)
    return first


def _updated(node: torch.fx.Node, of: _Lookup) -> IndexRange:
    return ANYTHING if _argument(node, 3, "accumulate") else of(node.args[0]).union(of(node.args[2]))


def _view(node: torch.fx.Node, of: _Lookup) -> IndexRange:
    return ANYTHING if isinstance(node.args[1], torch.dtype) else of(node.args[0])


def _filled(node: torch.fx.Node, of: _Lookup) -> IndexRange:
    return of(node.args[1])


def _scalar(node: torch.fx.Node, of: _Lookup) -> IndexRange:
    return of(node.args[0])


def _zeros(node: torch.fx.Node, of: _Lookup) -> IndexRange:
    return IndexRange(0, 0)


def _ones(node: torch.fx.Node, of: _Lookup) -> IndexRange:
    return IndexRange(1, 1)


def _arange(node: torch.fx.Node, of: _Lookup) -> IndexRange:
    start, end = (0, node.args[0]) if len(node.args) == 1 else node.args[:2]
    step = node.args[2] if len(node.args) > 2 else 1
    count = math.ceil((end - start) / step)
    last = start + (max(count, 1) - 1) * step
    return IndexRange(min(start, last), max(start, last))


def _argument(node: torch.fx.Node, position: int, name: str, default: Any = None) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


_SAME = (
    "_to_copy alias clone detach expand permute reshape select slice squeeze t transpose unsqueeze _unsafe_view "
    "index_select index gather flip repeat"
)
_RULES: dict[str, Callable[[torch.fx.Node, _Lookup], IndexRange]] = {
    **{f"aten.{name}": _same for name in _SAME.split()},
    "aten.view": _view,
    "aten.copy": lambda node, of: of(node.args[1]),
    "aten.add": _add,
    "aten.sub": _sub,
    "aten.rsub": _rsub,
    "aten.mul": _mul,
    "aten.floor_divide": _floor_divide,
    "aten.div": _div,
    "aten.remainder": _remainder,
    "aten.split": _same,
    "aten.split_with_sizes": _same,
    "aten.unbind": _same,
    "<built-in function getitem>": _same,  # one result of these
    "aten.clamp": _clamp,
    "aten.clamp_min": _at_least,
    "aten.clamp_max": _at_most,
    "aten.maximum": _at_least,
    "aten.minimum": _at_most,
    "aten.where": _where,
    "aten.cat": _first_of_list,
    "aten.stack": _first_of_list,
    "aten.index_put": _updated,
    "aten.full": _filled,
    "aten.full_like": _filled,
    "aten.new_full": lambda node, of: of(node.args[2]),
    "aten.scalar_tensor": _scalar,
    "aten.zeros": _zeros,
    "aten.zeros_like": _zeros,
    "aten.new_zeros": _zeros,
    "aten.ones": _ones,
    "aten.ones_like": _ones,
    "aten.new_ones": _ones,
    "aten.arange": _arange,
}

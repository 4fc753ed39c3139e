"""What a graph must be to run on a device that compiles ahead of time, and the check that it is.

The rules are those of the design; each is a function over the traced graph that yields what it found. What compiles in
one lane may still be refused, or copied, in another: here a graph has to suit all of them.
"""

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from vllm_neuron_cache.errors import GraphRuleError, GraphViolation
from vllm_neuron_cache.graphs.aliases import SCATTERS, AliasChain, alias_chains, mutated_names
from vllm_neuron_cache.graphs.index_range import IndexRange, index_ranges, operator_name
from vllm_neuron_cache.graphs.neuron_operators import INTEGER_REDUCE, UNSUPPORTED_DTYPES, UNSUPPORTED_OPERATORS
from vllm_neuron_cache.graphs.spec import GraphSpec, flat_names
from vllm_neuron_cache.graphs.tracing import trace_graph

aten = torch.ops.aten

_GATHERS = {aten.index.Tensor, aten._unsafe_index.Tensor, aten.index_select.default, aten.gather.default}
_REDUCING = {
    aten.index_add.default,
    aten.index_reduce.default,
    aten.scatter.reduce,
    aten.scatter.value_reduce,
    aten.scatter_add.default,
    aten.scatter_reduce.two,
}
_MAY_ACCUMULATE = {aten.index_put.default, aten._unsafe_index_put.default, aten.put.default}
_FLAT = {aten.take.default, aten.put.default}
"""Index into all elements, in order."""
_INDEXED_BY_LIST = {
    aten.index.Tensor,
    aten._unsafe_index.Tensor,
    aten.index_put.default,
    aten._unsafe_index_put.default,
}
_BOOLEAN_SELECTIONS = {aten.masked_select.default, aten.masked_scatter.default}


class GraphReport(NamedTuple):
    """What a graph is made of."""

    operators: dict[str, int]
    """How often each operator occurs, by its full name."""
    aliases: dict[str, int]
    """The alias map: flattened name of each mutated argument, and the number of the output that replaces it when the
    mutated arguments come out first."""
    violations: tuple[GraphViolation, ...]


class _Graph(NamedTuple):
    """A traced graph with what the rules need to know of it."""

    nodes: list[torch.fx.Node]
    placeholders: dict[str, torch.fx.Node]
    """By flattened name of the argument."""
    chains: list[AliasChain]
    """Without those of arguments that a declared opaque operator, and nothing else, mutates."""
    ranges: Mapping[torch.fx.Node, IndexRange]
    opaque: frozenset[str]
    """Declared opaque operators."""

    def name_of(self, placeholder: torch.fx.Node) -> str:
        return next(name for name, node in self.placeholders.items() if node is placeholder)

    @property
    def calls(self) -> Iterator[torch.fx.Node]:
        """Without the declared opaque operators, and what writes their results back."""
        return (node for node in _calls(self.nodes) if not _is_opaque(node, self.opaque))


def check_spec(spec: GraphSpec, bucket: int) -> GraphReport:
    """Traces one bucket on the meta device, without memory, and checks it.

    Raises `GraphRuleError` with every violation found, of the alias map by `spec.mutates` too.
    """
    args = spec.meta_args(bucket)
    return check_traced(spec, trace_graph(spec.name, spec.fn, args), args)


def check_traced(spec: GraphSpec, graph: torch.fx.GraphModule, args: tuple[Any, ...]) -> GraphReport:
    """Checks a graph that `trace_graph` made of `spec.fn` with `args`; otherwise as `check_spec`."""
    report = check_graph(graph, flat_names(spec.fn, args), spec.index_limits, spec.opaque)
    violations = [*report.violations, *alias_violations(tuple(report.aliases), spec.mutated_names(args))]
    if violations:
        raise GraphRuleError(spec.name, violations)
    return report


def check_graph(
    graph: torch.fx.GraphModule,
    names: Iterable[str],
    index_limits: Mapping[str, int] | None = None,
    opaque: frozenset[str] = frozenset(),
) -> GraphReport:
    """Applies every rule to a graph as `trace_graph` makes it. `names` are those of its placeholders, in order;
    `index_limits` and `opaque` as in `GraphSpec`."""
    nodes = list(graph.graph.nodes)
    placeholders = dict(zip(names, (node for node in nodes if node.op == "placeholder"), strict=True))
    index_limits = index_limits or {}
    unknown = [name for name in index_limits if name not in placeholders]
    limits = {
        placeholders[name].name: IndexRange(0, limit - 1) for name, limit in index_limits.items() if name not in unknown
    }
    chains = [chain for chain in alias_chains(graph.graph) if not _is_opaque(chain.write_back, opaque)]
    traced = _Graph(nodes, placeholders, chains, index_ranges(graph.graph, limits), opaque)
    return GraphReport(
        operators=dict(sorted(Counter(foreign_operator(node) or str(node.target) for node in _calls(nodes)).items())),
        aliases={name: output for output, name in enumerate(mutated_names(graph.graph, tuple(placeholders)))},
        violations=(
            *(GraphViolation("index_out_of_range", name, "has a limit and is no argument") for name in unknown),
            *(GraphViolation(rule, node.name, text) for rule, find in RULES.items() for node, text in find(traced)),
        ),
    )


def alias_violations(found: tuple[str, ...], declared: tuple[str, ...]) -> list[GraphViolation]:
    """What to say when a graph mutates other arguments than its spec declares; empty if they are the same."""
    return [
        *(
            GraphViolation("alias_map", name, "is mutated, and not declared in mutates")
            for name in found
            if name not in declared
        ),
        *(
            GraphViolation("alias_map", name, "is declared in mutates, and not mutated")
            for name in declared
            if name not in found
        ),
    ]


# The rules. Each yields the node at fault and what is wrong with it. -------------------------------------------

_Found = Iterator[tuple[torch.fx.Node, str]]


def _opaque_operator(graph: _Graph) -> _Found:
    for node in graph.calls:
        name = foreign_operator(node)
        if name is not None:
            yield node, f"{name} is none of torch's operators, and not declared in opaque"


def _dynamic_shape(graph: _Graph) -> _Found:
    for node in graph.nodes:
        for value in _values(node):
            sizes = (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,)
            if any(isinstance(size, torch.SymInt) for size in sizes):
                yield node, f"has a size that is not a number: {tuple(map(str, sizes))}"
                break


def _data_dependent(graph: _Graph) -> _Found:
    for node in graph.calls:
        tags = getattr(node.target, "tags", ())
        if node.target in _GATHERS or node.target in _BOOLEAN_SELECTIONS or _reads_scalar(node):
            continue  # the rules for masks and for the host have these
        if torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags:
            yield node, f"{node.target} makes a shape or a value that depends on data"


def _boolean_index(graph: _Graph) -> _Found:
    for node in graph.calls:
        masked = any(_dtype(index) in (torch.bool, torch.uint8) for _, index in _indices(node))
        if masked or node.target in _BOOLEAN_SELECTIONS:
            yield node, f"{node.target} selects by a mask; use int32 indices, padded"


def _host_transfer(graph: _Graph) -> _Found:
    device = next((value.device for node in graph.placeholders.values() for value in _values(node)), None)
    for node in graph.nodes:
        if node.op == "get_attr":
            yield node, "is a constant of the host, kept in the graph; make it an argument"
        elif _reads_scalar(node):
            yield node, f"{node.target} reads a value on the host"
        else:
            elsewhere = {value.device for value in _values(node) if isinstance(value, torch.Tensor)} - {device}
            if elsewhere:
                yield node, f"{node.target} is on {', '.join(map(str, elsewhere))} instead of {device}"


def _mutation_through_view(graph: _Graph) -> _Found:
    for chain in graph.chains:
        if chain.views:
            name = graph.name_of(chain.target)
            yield chain.views[0], f"{name} is mutated through a view ({chain.views[0].target})"


def _read_before_write(graph: _Graph) -> _Found:
    for chain in graph.chains:
        if chain.updates:
            for reader in chain.other_readers:
                yield reader, f"reads {graph.name_of(chain.target)}, which {chain.updates[0].name} changes"


def _mutated_returned(graph: _Graph) -> _Found:
    (output,) = (node for node in graph.nodes if node.op == "output")
    for chain in graph.chains:
        if chain.is_returned_by(output):
            yield output, f"returns {graph.name_of(chain.target)}, which the graph mutates"


def _whole_buffer_rewrite(graph: _Graph) -> _Found:
    write_backs = {chain.write_back for chain in graph.chains}
    for node in graph.calls:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable and node not in write_backs:
            yield node, f"{node.target} changes a tensor where only functional operators are expected"
    for chain in graph.chains:
        if not chain.reaches_target:
            name = graph.name_of(chain.target)
            yield chain.source, f"replaces {name} as a whole instead of updating rows of it"


def _int64_index(graph: _Graph) -> _Found:
    for node in graph.calls:
        for _, index in _indices(node):
            if _dtype(index) is torch.int64:
                yield node, f"{node.target} has the int64 indices {index}; use int32"
        if node.target in SCATTERS:
            values = [node.args[0], *(arg for arg in node.args[2:] if isinstance(arg, torch.fx.Node))]
            for value in values:
                if _dtype(value) is torch.int64 and value not in [index for _, index in _indices(node)]:
                    yield node, f"{node.target} scatters the int64 values {value}; device scatters take 32 bits"


def _unordered_scatter(graph: _Graph) -> _Found:
    for chain in graph.chains:
        name = graph.name_of(chain.target)
        for later in chain.updates[1:]:
            yield later, f"is one of {len(chain.updates)} updates of {name}, whose order is up to the compiler"
    for node in graph.calls:
        accumulates = node.target in _MAY_ACCUMULATE and len(node.args) > 3
        if node.target in _REDUCING or (accumulates and node.args[3]):
            yield node, f"{node.target} accumulates, in the compiler's order"


def _index_out_of_range(graph: _Graph) -> _Found:
    for node in graph.calls:
        if _takes_indices(node) and not _indices(node) and node.target not in _BOOLEAN_SELECTIONS:
            yield node, f"{node.target} takes indices that this check cannot follow"
        for dim, index in _indices(node):
            if _dtype(index) in (torch.bool, torch.uint8):
                continue
            (value,) = _values(node.args[0])
            size, values = value.numel() if dim is None else value.shape[dim], graph.ranges[index]
            if values.low < 0 or not values.high < size:
                where = "all elements" if dim is None else f"dimension {dim}"
                yield node, f"{node.target} takes indices {index} of {values} into {where} of {size}"


def _unsupported_operator(graph: _Graph) -> _Found:
    for node in graph.calls:
        name = operator_name(node.target)
        if name in UNSUPPORTED_OPERATORS:
            yield node, f"{node.target}: {UNSUPPORTED_OPERATORS[name]}"
        if node.target in _REDUCING and not _dtype(node.args[0]).is_floating_point:
            yield node, f"{node.target}: {INTEGER_REDUCE}"
    for node in graph.nodes:
        for value in _values(node):
            reason = UNSUPPORTED_DTYPES.get(getattr(value, "dtype", None))
            if reason:
                yield node, f"is {value.dtype}: {reason}"


RULES: dict[str, Callable[[_Graph], _Found]] = {
    "opaque_operator": _opaque_operator,
    "dynamic_shape": _dynamic_shape,
    "data_dependent": _data_dependent,
    "boolean_index": _boolean_index,
    "host_transfer": _host_transfer,
    "mutation_through_view": _mutation_through_view,
    "read_before_write": _read_before_write,
    "mutated_returned": _mutated_returned,
    "whole_buffer_rewrite": _whole_buffer_rewrite,
    "int64_index": _int64_index,
    "unordered_scatter": _unordered_scatter,
    "index_out_of_range": _index_out_of_range,
    "unsupported_operator": _unsupported_operator,
}
"""Every rule, by the name that a violation gives. `alias_map` comes on top, where a spec is checked."""


def foreign_operator(node: torch.fx.Node) -> str | None:
    """Name, without its overload, of an operator that is not one of torch's own; None for any other node.

    One that mutates arguments is in a functional graph as what a wrapper of torch's, with it as the first argument,
    calls on copies.
    """
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        if target.name().startswith("auto_functionalized"):
            target = node.args[0]
        else:
            return f"higher_order.{target.name()}"
    if isinstance(target, torch._ops.OpOverload) and target.namespace not in ("aten", "prims"):
        return operator_name(target)
    return None


def _is_opaque(node: torch.fx.Node, opaque: frozenset[str]) -> bool:
    """Whether a node is a declared opaque operator, or writes back what one made of an argument, as it is."""
    if node.target is aten.copy_.default and isinstance(node.args[1], torch.fx.Node):
        result = node.args[1]
        return result.target is operator.getitem and foreign_operator(result.args[0]) in opaque
    return foreign_operator(node) in opaque


def _calls(nodes: Iterable[torch.fx.Node]) -> Iterator[torch.fx.Node]:
    return (node for node in nodes if node.op == "call_function")


def _values(node: torch.fx.Node) -> list[Any]:
    """What tracing says of a node's result: tensors without data, or symbolic numbers."""
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else [value]
    return [value for value in values if isinstance(value, torch.Tensor | torch.SymInt)]


def _dtype(node: Any) -> torch.dtype | None:
    return getattr(node.meta.get("val"), "dtype", None) if isinstance(node, torch.fx.Node) else None


def _reads_scalar(node: torch.fx.Node) -> bool:
    return node.target is aten._local_scalar_dense.default


def _takes_indices(node: torch.fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(
        argument.name in ("index", "indices") and "Tensor" in str(argument.type) for argument in schema.arguments
    )


def _indices(node: torch.fx.Node) -> list[tuple[int | None, torch.fx.Node]]:
    """The index tensors of a gather or scatter, each with the dimension it goes into; None for all of them as one."""
    if node.target in _FLAT:
        return [(None, node.args[1])]
    if node.target in _INDEXED_BY_LIST:
        return [(dim, index) for dim, index in enumerate(node.args[1]) if index is not None]
    if node.target in _GATHERS or node.target in SCATTERS:
        return [(node.args[1], node.args[2])]
    if node.target is aten.embedding.default:
        return [(0, node.args[1])]
    return []

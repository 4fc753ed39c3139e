"""How a traced graph updates its arguments: from the final `copy_` back to the argument itself."""

import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch

aten = torch.ops.aten

SCATTERS = {
    aten.index_put.default,
    aten._unsafe_index_put.default,
    aten.index_copy.default,
    aten.index_add.default,
    aten.index_fill.int_Scalar,
    aten.index_fill.int_Tensor,
    aten.index_reduce.default,
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter.reduce,
    aten.scatter.value_reduce,
    aten.put.default,
    aten.scatter_add.default,
    aten.scatter_reduce.two,
}
"""Operators that replace elements of a tensor at places that indices name."""

_VIEW_UPDATES = {
    aten.slice_scatter.default,
    aten.select_scatter.default,
    aten.diagonal_scatter.default,
    aten.as_strided_scatter.default,
}
"""What a mutation through a view becomes when views are taken out of a graph: the base with a part replaced."""


_SHAPE_READERS = {
    aten.empty_like.default,
    aten.full_like.default,
    aten.new_empty.default,
    aten.new_full.default,
    aten.new_ones.default,
    aten.new_zeros.default,
    aten.ones_like.default,
    aten.zeros_like.default,
}
"""Operators that look at a tensor's shape and dtype, not at what is in it."""


def _is_view(node: torch.fx.Node) -> bool:
    # getitem takes one result of an operator with several, such as split.
    return node.target in (aten._unsafe_view.default, operator.getitem) or getattr(node.target, "is_view", False)


class AliasChain(NamedTuple):
    """One mutated argument."""

    target: torch.fx.Node
    """Its placeholder."""
    write_back: torch.fx.Node
    """The `copy_` onto it."""
    source: torch.fx.Node
    """Where the walk back ended: the placeholder itself, unless the argument was replaced as a whole."""
    updates: list[torch.fx.Node]
    """Scatters that make its new value, in order."""
    views: list[torch.fx.Node]
    """Views on the way, in order."""

    @property
    def reaches_target(self) -> bool:
        return self.source is self.target

    @property
    def other_readers(self) -> list[torch.fx.Node]:
        """Nodes that use the argument's old value, beside the update itself and views for it."""
        path = {self.write_back, *self.updates, *self.views}
        return [
            user
            for user in self.target.users
            if user not in path and user.op != "output" and user.target not in _SHAPE_READERS
        ]

    def is_returned_by(self, output: torch.fx.Node) -> bool:
        """Whether an output is the argument, old or new, or a view of it."""
        own = {self.target, self.write_back, *self.updates, *self.views, self.write_back.args[1]}
        return any(_base(node) in own for node in output.all_input_nodes)


def alias_chains(graph: torch.fx.Graph) -> list[AliasChain]:
    """The chain of every argument that the graph mutates, in the order of their `copy_` nodes."""
    return [
        _chain(node)
        for node in graph.nodes
        if node.op == "call_function" and node.target is aten.copy_.default and node.args[0].op == "placeholder"
    ]


def mutated_names(graph: torch.fx.Graph, names: Sequence[str]) -> tuple[str, ...]:
    """Which of the placeholders the graph mutates, in their order; `names` has one for each."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    mutated = {chain.target for chain in alias_chains(graph)}
    return tuple(name for name, node in zip(names, placeholders, strict=True) if node in mutated)


def _chain(write_back: torch.fx.Node) -> AliasChain:
    target, node = write_back.args[:2]
    updates: list[torch.fx.Node] = []
    views: list[torch.fx.Node] = []
    while node is not target and node.op == "call_function":
        if node.target in SCATTERS or node.target is aten.masked_scatter.default:
            updates.append(node)
        elif _is_view(node) or node.target in _VIEW_UPDATES:
            views.append(node)
        else:
            break
        node = node.args[0]
    return AliasChain(target, write_back, node, updates[::-1], views[::-1])


def _base(node: torch.fx.Node) -> torch.fx.Node:
    while node.op == "call_function" and _is_view(node):
        node = node.args[0]
    return node

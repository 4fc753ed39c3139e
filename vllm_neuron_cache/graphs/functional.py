"""Graphs as compilers without mutation take them: the new values of the mutated arguments are results."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from vllm_neuron_cache.graphs.aliases import AliasChain, alias_chains
from vllm_neuron_cache.graphs.spec import GraphSpec, flat_names, flatten, unflatten
from vllm_neuron_cache.graphs.tracing import trace_graph


class FunctionalForm(NamedTuple):
    """A graph that mutates nothing."""

    graph: torch.fx.GraphModule
    """Takes the flattened arguments; gives their new values and then what `spec.fn` returns, without its Nones."""
    names: tuple[str, ...]
    """Flattened names of all arguments."""
    mutated: tuple[int, ...]
    """Positions of those that the function mutates, in the order of the new values."""
    num_returned: int
    """How many results follow the new values."""
    example: tuple[torch.Tensor, ...]
    """Zeros of all arguments, on the CPU."""

    @property
    def aliases(self) -> dict[str, int]:
        """The alias map: name of each mutated argument, and the number of its new value among the results."""
        return {self.names[at]: output for output, at in enumerate(self.mutated)}

    def states(self, tensors: Sequence[Any]) -> list[Any]:
        """What belongs to the mutated arguments, of one thing for each argument."""
        return [tensors[at] for at in self.mutated]

    def inputs(self, tensors: Sequence[Any]) -> list[Any]:
        """What belongs to the other arguments."""
        return [tensor for at, tensor in enumerate(tensors) if at not in self.mutated]

    def __call__(self, states: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """All results, of the mutated arguments' values and those of the others."""
        remaining_states, remaining_inputs = iter(states), iter(inputs)
        tensors = [next(remaining_states if at in self.mutated else remaining_inputs) for at in range(len(self.names))]
        return tuple(self.graph(*tensors))


def functional_form(spec: GraphSpec, example_args: tuple[Any, ...]) -> FunctionalForm:
    """The functional form of a spec for arguments of these shapes, dtypes and layouts, which are not touched.

    Traced on the CPU, whose memory for zeros costs nothing until it is written: a compiler that moves everything to a
    device of its own gets neither tensors nor constants of another one. Raises `GraphRuleError` as `trace_graph` does.
    """
    with torch.inference_mode(False):
        example = tuple(torch.zeros_like(tensor, device="cpu") for tensor in flatten(example_args))
    graph = trace_graph(spec.name, spec.fn, unflatten(example, example_args))
    mutated = mutated_positions(graph.graph)
    return_new_values(graph)
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    results = tuple(result for result in output.args[0] if result is not None)
    output.args = (results,)
    graph.recompile()
    return FunctionalForm(
        graph, flat_names(spec.fn, example_args), mutated, num_returned=len(results) - len(mutated), example=example
    )


def mutated_positions(graph: torch.fx.Graph) -> tuple[int, ...]:
    """Which of the arguments a traced graph mutates, by number."""
    targets = {chain.target for chain in alias_chains(graph)}
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    return tuple(at for at, node in enumerate(placeholders) if node in targets)


def return_new_values(graph: torch.fx.GraphModule) -> None:
    """Takes the final `copy_` nodes out: what they would write is returned first, in the order of the arguments."""
    chains: dict[torch.fx.Node, AliasChain] = {chain.target: chain for chain in alias_chains(graph.graph)}
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    new_values = [chains[node].write_back.args[1] for node in graph.graph.nodes if node in chains]
    for chain in chains.values():
        chain.write_back.replace_all_uses_with(chain.write_back.args[1])
        graph.graph.erase_node(chain.write_back)
    returned = output.args[0] if isinstance(output.args[0], tuple | list) else (output.args[0],)
    output.args = ((*new_values, *returned),)
    graph.recompile()

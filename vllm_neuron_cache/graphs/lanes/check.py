"""Every rule of `graphs.check`, and then the checked graph itself, operator by operator."""

from collections.abc import Callable
from typing import Any

import torch

from vllm_neuron_cache.graphs.check import check_spec, check_traced
from vllm_neuron_cache.graphs.lanes.base import CompiledGraph, Lane, Lowered
from vllm_neuron_cache.graphs.spec import GraphSpec, flatten
from vllm_neuron_cache.graphs.tracing import trace_graph


class CheckLane(Lane):
    """What is refused anywhere is refused here, and what runs is AOTAutograd's graph and not the function: slow,
    because each mutated argument is copied as a whole."""

    name = "check"

    def _lower(self, spec: GraphSpec, bucket: int, example_args: tuple[Any, ...]) -> Lowered:
        check_spec(spec, bucket)  # where a host is another device
        graph = trace_graph(spec.name, spec.fn, example_args)
        report = check_traced(spec, graph, example_args)  # and what runs here
        self.num_compiled += 1
        name = f"{spec.name}, bucket {bucket}"
        return Lowered(CompiledGraph(self, name, _kernel(graph), list(flatten(example_args))), tuple(report.aliases))


def _kernel(graph: torch.fx.GraphModule) -> Callable[[list[torch.Tensor]], Any]:
    def run(tensors: list[torch.Tensor]) -> Any:
        outputs = graph(*tensors)
        return outputs if any(output is not None for output in outputs) else None

    return run

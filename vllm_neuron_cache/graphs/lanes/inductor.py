"""torch.compile with the inductor backend: the default on CPU."""

import types
from collections.abc import Callable
from typing import Any

import torch
from torch._inductor.compile_fx import compile_fx

from vllm_neuron_cache.errors import GraphRecompiledError
from vllm_neuron_cache.graphs.lanes.base import Lane
from vllm_neuron_cache.graphs.spec import GraphSpec


class InductorLane(Lane):
    """One static graph per bucket.

    Every compilation passes through the lane's backend, which counts it before warm-up ends and raises after. So a
    recompilation cannot happen unseen, and steady-state calls pay nothing for that.
    """

    name = "inductor"

    def lower(self, spec: GraphSpec, bucket: int) -> Callable[..., Any]:
        def backend(graph_module: torch.fx.GraphModule, example_inputs: list[Any], **options: Any) -> Any:
            if self._sealed:
                self.num_recompiles_refused += 1
                shapes = [tuple(x.shape) for x in example_inputs if isinstance(x, torch.Tensor)]
                raise GraphRecompiledError(
                    f"graph {spec.name}, bucket {bucket}: an input differs from those of warm-up, and nothing compiles "
                    f"after it; the inputs now have the shapes {shapes}"
                )
            self.num_compiled += 1
            return compile_fx(graph_module, example_inputs, **options)

        return torch.compile(_own_code(spec.fn, f"{spec.name}_{bucket}"), backend=backend, fullgraph=True, dynamic=False)


def _own_code(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A twin of `fn` with a code object of its own.

    torch.compile keeps what it compiled per code object, tries the guards of all of them in turn, and stops at a limit
    (8 by default): buckets that share one would slow each other down and then fail.
    """
    return types.FunctionType(
        fn.__code__.replace(co_name=name), fn.__globals__, name, fn.__defaults__, fn.__closure__
    )

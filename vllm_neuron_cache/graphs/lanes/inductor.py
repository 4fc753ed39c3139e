"""torch.compile's inductor, ahead of time: the default on CPU."""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._dynamo.utils import counters
from torch._guards import TracingContext
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from vllm_neuron_cache.errors import ConfigurationError
from vllm_neuron_cache.graphs.aliases import mutated_names
from vllm_neuron_cache.graphs.lanes.base import CompiledGraph, Lane, Lowered
from vllm_neuron_cache.graphs.spec import GraphSpec, flat_names, flatten, unflatten

SINGLE_THREAD_BYTES = 4 << 20
"""Up to here a graph runs on the calling thread: waking others takes longer than they save. On two cores the merge of
256 rows of 2 KiB took 45 µs alone and 135 to 290 µs with a second thread."""


class InductorLane(Lane):
    """One compiled artifact per bucket, called directly.

    Graphs are traced with `make_fx` and compiled at once, so neither Dynamo's guards nor wrappers stand between a call
    and its kernel: a launch takes 3 µs instead of 22, caches warm. What guards would have noticed is checked against
    the example arguments: a call of another signature raises instead of compiling.
    """

    name = "inductor"

    def __init__(self, kernel: str = "compiler") -> None:
        super().__init__(kernel)
        if not compiler_available():
            raise ConfigurationError(
                "lane 'inductor' compiles C++ and there is no C++ compiler here. Install one (apt-get install g++), or "
                "set vllm_neuron_cache.lane to 'eager', which is slower."
            )

    def _lower(self, spec: GraphSpec, bucket: int, example_args: tuple[Any, ...]) -> Lowered:
        def flat_fn(*tensors: torch.Tensor) -> Any:
            return spec.fn(*unflatten(tensors, example_args))

        tensors = list(flatten(example_args))
        options = {"cpp.threads": 1} if spec.bytes_per_row * bucket <= SINGLE_THREAD_BYTES else {}
        with inductor_config.patch(options):
            compiled = _compile(
                make_fx(flat_fn, tracing_mode="fake")(*tensors), tensors, flat_names(spec.fn, example_args)
            )
        self.num_compiled += 1
        self.num_from_cache += compiled.from_cache
        graph = CompiledGraph(self, f"{spec.name}, bucket {bucket}", compiled.kernel, tensors)
        return Lowered(graph, compiled.aliases)


class _Compiled(NamedTuple):
    kernel: Callable[[list[torch.Tensor]], Any]
    """Inductor's generated function, which takes the graph's inputs as a list that it empties."""
    aliases: tuple[str, ...]
    """Names of the inputs that the graph which inductor got writes back to."""
    from_cache: bool
    """Whether inductor's cache on disk had the code."""


class _KernelTaken(Exception):
    """Ends compile_fx when the kernel is compiled."""


def _compile(graph: torch.fx.GraphModule, tensors: list[torch.Tensor], names: tuple[str, ...]) -> _Compiled:
    """Compiles a graph of in-place operators, whose inputs have these names.

    compile_fx puts wrappers around it that serve gradients, views and caller-owned outputs; a graph of ours has none
    of these and takes its inputs in the traced order, so they are left out: called once in a step, with cold caches,
    they take several times longer than the small kernels.
    """
    kept: list[_Compiled] = []

    def keep_kernel(lowered: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        aliases = mutated_names(lowered.graph, names)  # inductor changes the graph
        # Inductor's cache on disk asks for the place where symbols for shapes would be. The graph is traced, without
        # any: had it been there before, sizes would have become symbols.
        TracingContext.get().fake_mode.shape_env = ShapeEnv()
        hits = counters["inductor"]["fxgraph_cache_hit"]
        compiled = compile_fx_inner(lowered, *args, **kwargs)
        from_cache = counters["inductor"]["fxgraph_cache_hit"] > hits
        kept.append(_Compiled(compiled.current_callable, aliases, from_cache))
        raise _KernelTaken

    # AOTAutograd's cache would return the wrapped result of an earlier process without compiling, and keep nothing.
    with torch._functorch.config.patch(enable_autograd_cache=False), contextlib.suppress(_KernelTaken):
        # compile_fx finishes its work in the first call, which would then run the kernel: an encoder takes its time.
        compile_fx(graph, tensors, inner_compile=keep_kernel)(*tensors)
    (compiled,) = kept
    return compiled


def compiler_available() -> bool:
    """Whether inductor finds the C++ compiler that it needs on CPU."""
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return False
    return True

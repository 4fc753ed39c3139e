"""TorchNeuron, AWS's native PyTorch backend: `torch.compile` for the device `neuron`. Needs Python 3.12 or later."""

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from vllm_neuron_cache.errors import ConfigurationError, GraphRecompiledError
from vllm_neuron_cache.graphs.aliases import mutated_names
from vllm_neuron_cache.graphs.lanes.base import CompiledGraph, Lane, Lowered
from vllm_neuron_cache.graphs.spec import GraphSpec, flat_names, flatten, unflatten
from vllm_neuron_cache.graphs.tracing import trace_graph

if TYPE_CHECKING:
    from vllm_neuron_cache.kernels.operators import KernelOperator

PACKAGE_INDEX = "https://pip.repos.neuron.amazonaws.com"

_REFUSED = "fail_on_recompile"
_STANCE = threading.Lock()
"""Held where the stance is set, which belongs to the whole process: two threads that launch at once would each put back
what the other had set. A launch does not wait for the device."""


class NeuronLane(Lane):
    """One `torch.compile(backend="neuron", fullgraph=True, dynamic=False)` per bucket, run once in `lower`.

    A call reaches Dynamo only with the shapes, layouts, dtypes and devices of the example arguments, and Dynamo may
    not compile in it. The stance that forbids this is the whole process's, so it is taken for the length of a call:
    whatever else compiles goes on doing so.

    The backend makes its alias map inside and shows none. The one reported here is that of AOTAutograd's graph, which
    is what the backend gets; whether it updates in place is for a device to show.

    A graph that calls kernels is compiled with what `torch_neuronx.nki_op` makes of them, in the place of their
    operators: the backend compiles the kernel as a part of the graph. Hash and alias map are those of the operators.

    Sources: backend name, device, `fullgraph`, and that `dynamic=True` is rejected:
    https://awsdocs-neuron.readthedocs-hosted.com/en/latest/torch/compile/reference-torch-compile.html.
    Compiled in the first call of a signature, through AOTAutograd and StableHLO:
    https://awsdocs-neuron.readthedocs-hosted.com/en/latest/torch/compile/about-torch-compile.html.
    Stance: https://docs.pytorch.org/docs/stable/generated/torch.compiler.set_stance.html.
    `nki_op(name, mutates_args=...)`, and that its calls are nodes of the captured graph:
    https://awsdocs-neuron.readthedocs-hosted.com/en/latest/torch/guides/how-to-work-with-nki.html.
    """

    name = "neuron"
    device: ClassVar[str] = "neuron"

    def __init__(self, kernel: str = "compiler") -> None:
        super().__init__(kernel)
        _require_backend(kernel)

    def _lower(self, spec: GraphSpec, bucket: int, example_args: tuple[Any, ...]) -> Lowered:
        tensors = [tensor.to(self.device) for tensor in flatten(example_args)]
        compiled = torch.compile(_own_code(spec), backend="neuron", fullgraph=True, dynamic=False)
        compiled(*unflatten(tensors, example_args))
        self.num_compiled += 1

        name = f"{spec.name}, bucket {bucket}"
        names = flat_names(spec.fn, example_args)

        def kernel(tensors: list[torch.Tensor]) -> Any:
            try:
                with _STANCE, torch.compiler.set_stance(_REFUSED):
                    return compiled(*unflatten(tensors, example_args))
            except RuntimeError as error:
                if _REFUSED not in str(error):
                    raise
                raise refused(self, name, str(error)) from error

        graph = trace_graph(spec.name, spec.fn, spec.meta_args(bucket))
        return Lowered(CompiledGraph(self, name, kernel, tensors), mutated_names(graph.graph, names))


def refused(lane: Lane, graph: str, what: str) -> GraphRecompiledError:
    """Counts a call that a compiled graph cannot serve, and says why."""
    lane.num_recompiles_refused += 1
    return GraphRecompiledError(f"graph {graph}: {what}. Nothing compiles after warm-up.")


def not_installed(lane: str, what: str, remedy: str) -> ConfigurationError:
    return ConfigurationError(
        f"lane '{lane}' {what}. {remedy} The projects of these names on PyPI are placeholders: the packages come from "
        f"AWS's own index, --extra-index-url {PACKAGE_INDEX}, and from its machine images and containers."
    )


def _require_backend(kernel: str) -> None:
    remedy = (
        "Install TorchNeuron in Python 3.12, 3.13 or 3.14, in the version of your torch: pip install "
        f"torch-neuronx==2.13.* --extra-index-url {PACKAGE_INDEX}."
    )
    try:
        import torch_neuronx
    except ImportError as error:
        raise not_installed("neuron", f"needs torch-neuronx 2.13.3 or later ({error})", remedy) from error
    if "neuron" not in torch.compiler.list_backends(exclude_tags=()):
        what = "needs the native torch-neuronx, and the one here has no torch.compile backend 'neuron'"
        raise not_installed("neuron", what, f"It is the older one, for torch-xla. {remedy}")
    if kernel == "nki" and not hasattr(torch_neuronx, "nki_op"):
        what = "needs torch_neuronx.nki_op for kernel 'nki', and the torch-neuronx here has none"
        raise not_installed("neuron", what, f"{remedy} Or set vllm_neuron_cache.kernel to 'compiler'.")


@functools.cache
def _nki_operator(operator: "KernelOperator") -> Callable[..., None]:
    """The kernel as the backend takes it. Once in a process: a second operator of a name would take the first away."""
    import torch_neuronx

    name = operator.name.replace(".", "::")
    return torch_neuronx.nki_op(f"{name}_nki", mutates_args={operator.mutates})(operator.call)


def _own_code(spec: GraphSpec) -> Callable[..., Any]:
    """`spec.fn`, with kernels in the place of their operators, behind a code object of its own.

    Dynamo keeps what it compiled with the code object. With that of `spec.fn` the buckets of a graph would count as
    recompilations of one function, and it gives up at the eighth.
    """
    fn = spec.fn if spec.kernel_fn is None else spec.kernel_fn(_nki_operator)

    def graph(*args: Any) -> Any:
        return fn(*args)

    graph.__code__ = graph.__code__.replace(co_name=spec.name)
    graph.__name__ = graph.__qualname__ = spec.name
    return graph

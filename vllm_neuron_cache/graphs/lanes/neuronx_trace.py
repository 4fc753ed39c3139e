"""The older torch-neuronx, on torch-xla: `torch_neuronx.trace` with input-output aliases."""

from typing import Any

import torch

from vllm_neuron_cache.errors import ConfigurationError
from vllm_neuron_cache.graphs.functional import FunctionalForm, functional_form
from vllm_neuron_cache.graphs.lanes.base import CompiledGraph, Lane, Lowered
from vllm_neuron_cache.graphs.lanes.neuron import PACKAGE_INDEX, not_installed, refused
from vllm_neuron_cache.graphs.spec import GraphSpec, flatten

COMPILER_ARGS = ["--auto-cast=none"]
"""neuronx-cc's: the bits of a row are those that were written."""

NEURON_CORE = 0
"""The core that each process sees first."""


class NeuronxTraceLane(Lane):
    """One traced module per bucket, whose state is the memory of the mutated arguments.

    What is traced is a module: each mutated argument is one of its parameters, in their order, and its new value comes
    first among the results; the alias map says which result belongs to which parameter. The other arguments are the
    example inputs, on the CPU. The traced module has those parameters as its own, on the device. They are then given
    the memory of the example arguments, which several graphs share so; a call with another address for one of them is
    refused, because it would change other rows than the caller's.

    The alias map reported is that of the traced module: its parameters, held against the arguments.

    All of a call's arguments have to be on the device: with one that is not, results come back to the CPU.

    Sources: signature, and that aliases mark state on the device:
    https://awsdocs-neuron.readthedocs-hosted.com/en/latest/frameworks/torch/torch-neuronx/api-reference-guide/inference/api-torch-neuronx-trace.html,
    which has `move_trace_to_device` too. State as a ParameterList, results in one flat list, `{parameter: number of
    the result}`, and the parameters of the traced module as its state:
    https://awsdocs-neuron.readthedocs-hosted.com/en/latest/src/examples/pytorch/torch-neuronx/t5-inference-tutorial.html.
    Device of arguments and results:
    https://awsdocs-neuron.readthedocs-hosted.com/en/latest/neuron-runtime/explore/direct-hbm-tensor-alloc.html.
    Compiler arguments:
    https://awsdocs-neuron.readthedocs-hosted.com/en/latest/compiler/neuronx-cc/api-reference-guide/neuron-compiler-cli-reference-guide.html.
    """

    name = "neuronx_trace"

    def __init__(self, kernel: str = "compiler") -> None:
        super().__init__(kernel)
        self._torch_neuronx = _import_package()

    def _lower(self, spec: GraphSpec, bucket: int, example_args: tuple[Any, ...]) -> Lowered:
        form = functional_form(spec, example_args)
        # XLA and TorchScript know nothing of inference mode, in which a worker runs.
        with torch.inference_mode(False), torch.no_grad():
            module = _Stateful(form)
            traced = self._torch_neuronx.trace(
                module,
                tuple(form.inputs(form.example)),
                input_output_aliases=dict(zip(module.states, form.aliases.values(), strict=True)),
                compiler_args=COMPILER_ARGS,
            )
            self._torch_neuronx.move_trace_to_device(traced, NEURON_CORE)
        self.num_compiled += 1

        name = f"{spec.name}, bucket {bucket}"
        tensors = list(flatten(example_args))
        states = list(traced.parameters())
        aliases = _aliases(form, states)
        if aliases == tuple(form.aliases):
            for argument, state, tensor in zip(aliases, states, form.states(tensors)):
                if state.device != tensor.device:
                    raise ConfigurationError(
                        f"lane 'neuronx_trace' has the state of graph {name} on {state.device}, and {argument} is on "
                        f"{tensor.device}. Allocate it on {state.device}."
                    )
                state.data = tensor
        addresses = addresses_of(form, tensors)

        def kernel(tensors: list[torch.Tensor]) -> Any:
            refuse_elsewhere(self, name, form, addresses, tensors)
            results = traced(*form.inputs(tensors))
            # From the end: whether the new values come out as well is the runtime's affair.
            return list(results)[len(results) - form.num_returned :] if form.num_returned else None

        return Lowered(CompiledGraph(self, name, kernel, tensors), aliases)


class _Stateful(torch.nn.Module):
    """The functional form, with the mutated arguments as parameters."""

    def __init__(self, form: FunctionalForm) -> None:
        super().__init__()
        self._form = form
        self.states = torch.nn.ParameterList(
            torch.nn.Parameter(tensor, requires_grad=False) for tensor in form.states(form.example)
        )

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self._form(list(self.states), inputs)


def addresses_of(form: FunctionalForm, tensors: list[torch.Tensor]) -> list[int]:
    """Those of the mutated arguments: what a graph with state is bound to."""
    return [tensor.data_ptr() for tensor in form.states(tensors)]


def refuse_elsewhere(
    lane: Lane, graph: str, form: FunctionalForm, addresses: list[int], tensors: list[torch.Tensor]
) -> None:
    """Raises `GraphRecompiledError` if a mutated argument is not where the graph has it."""
    for argument, tensor, address in zip(form.aliases, form.states(tensors), addresses):
        if tensor.data_ptr() != address:
            raise refused(lane, graph, f"{argument} is another tensor than the one whose memory the graph updates")


def _aliases(form: FunctionalForm, states: list[torch.Tensor]) -> tuple[str, ...]:
    """Names of the arguments that the traced module has as state; a state that is none of them has a number."""
    found = []
    for number, state in enumerate(states):
        name = list(form.aliases)[number] if number < len(form.mutated) else ""
        argument = form.example[form.mutated[number]] if name else None
        matches = argument is not None and (state.shape, state.dtype) == (argument.shape, argument.dtype)
        found.append(name if matches else f"state {number}")
    return tuple(found)


def _import_package() -> Any:
    remedy = (
        "Install the version for torch-xla, of Neuron SDK 2.31 or earlier, in Python 3.10, 3.11 or 3.12: pip install "
        f"torch-neuronx==2.9.* neuronx-cc --extra-index-url {PACKAGE_INDEX}."
    )
    try:
        import torch_neuronx
    except ImportError as error:
        raise not_installed("neuronx_trace", f"needs torch-neuronx 2.9 ({error})", remedy) from error
    if not hasattr(torch_neuronx, "trace"):
        what = "needs torch_neuronx.trace, which the native torch-neuronx no longer has"
        raise not_installed("neuronx_trace", what, f"For the native one there is lane 'neuron'. {remedy}")
    return torch_neuronx

"""neuronx-distributed's ModelBuilder (ModelBuilderV2 in its documentation), by its two units `trace` and `compile`."""

from typing import Any, NamedTuple

import torch

from vllm_neuron_cache.graphs.functional import FunctionalForm, functional_form
from vllm_neuron_cache.graphs.lanes.base import CompiledGraph, Lane, Lowered
from vllm_neuron_cache.graphs.lanes.neuron import PACKAGE_INDEX, not_installed
from vllm_neuron_cache.graphs.lanes.neuronx_trace import addresses_of, refuse_elsewhere
from vllm_neuron_cache.graphs.spec import GraphSpec, flatten

COMPILER_ARGS = "--auto-cast=none -O1"
"""neuronx-cc's: the builder's own less what makes other numbers of some (`--enable-saturate-infinity`) and what is
meant for transformers."""


class NxdBuilderLane(Lane):
    """One `NxDModel` with one key per bucket, whose state is the memory of the mutated arguments.

    What is traced is a module: each mutated argument is a registered buffer that `forward` replaces, out of place, by
    its new value; the other arguments are `forward`'s own, by name. The builder finds the buffers that change and
    aliases them; those that it found are the alias map reported here. A state initializer of ours hands it the example
    arguments for rank 0, so that several graphs share their memory; a call with another address for one of them is
    refused, because it would change other rows than the caller's.

    Tensor parallelism is that of `parallel_state`, and of one rank where it is not initialised. Every rank gets the
    same arguments. Results stay on the device.

    Sources: `trace`, `compile`, `NxDModel`, its state initializer, `forward_mode`, and state as buffers:
    https://awsdocs-neuron.readthedocs-hosted.com/en/latest/libraries/neuronx-distributed/model_builder_v2_api_reference.html.
    `get_tensor_model_parallel_size`:
    https://awsdocs-neuron.readthedocs-hosted.com/en/latest/libraries/neuronx-distributed/api_guide.html.
    What a state initializer returns, and `model_parallel_is_initialized`, are in no page but in AWS's source:
    https://github.com/aws-neuron/neuronx-distributed (trace/nxd_model/base_nxd_model.py,
    parallel_layers/parallel_state.py).
    """

    name = "nxd_builder"

    def __init__(self, kernel: str = "compiler") -> None:
        super().__init__(kernel)
        self._nxd = _import_package()

    def _lower(self, spec: GraphSpec, bucket: int, example_args: tuple[Any, ...]) -> Lowered:
        key = f"{spec.name}_{bucket}"
        form = functional_form(spec, example_args)
        parameters = [_identifier(name) for name in form.names]
        # XLA knows nothing of inference mode, in which a worker runs.
        with torch.inference_mode(False), torch.no_grad():
            traced = self._nxd.trace(
                model=_stateful(form, parameters),
                kwargs=dict(zip(form.inputs(parameters), form.inputs(form.example))),
                spmd=True,
                preserve_parameters=False,
            )
            compiled = self._nxd.compile(
                hlo_module=traced.hlo, metaneff=traced.metaneff, compiler_args=COMPILER_ARGS, key=key
            )
        self.num_compiled += 1

        tensors = list(flatten(example_args))
        arguments = dict(zip(parameters, tensors))
        ranks = self._num_ranks()
        # Without an initializer the model makes one for the states that the compiled graph has.
        probe = self._nxd.NxDModel(world_size=ranks)
        probe.add(key=key, trace_artifacts=traced, compilation_artifacts=compiled)
        found = probe.state_initializer
        states = dict(found.shapes) if found is not None else {}
        names = {_identifier(name): name for name in form.aliases}
        aliases = tuple(names.get(state, state) for state in states)
        name = f"{spec.name}, bucket {bucket}"
        if set(aliases) != set(form.aliases):
            return Lowered(spec.fn, aliases)  # which `lower` refuses

        owned = {state: arguments[state] for state in states}
        initializer = _bound_initializer(self._nxd.StateInitializer, found, ranks, owned)
        model = self._nxd.NxDModel(world_size=ranks, state_initializer=initializer)
        model.add(key=key, trace_artifacts=traced, compilation_artifacts=compiled)
        model.to_neuron()
        addresses = addresses_of(form, tensors)
        inputs = form.inputs(parameters)

        def kernel(tensors: list[torch.Tensor]) -> Any:
            refuse_elsewhere(self, name, form, addresses, tensors)
            ranked = {parameter: [tensor] * ranks for parameter, tensor in zip(inputs, form.inputs(tensors))}
            results = model(model_name=key, forward_mode="ranked", **ranked)
            return [by_rank[0] for by_rank in results[: form.num_returned]] or None

        return Lowered(CompiledGraph(self, name, kernel, tensors), tuple(sorted(aliases, key=form.names.index)))

    def _num_ranks(self) -> int:
        state = self._nxd.parallel_state
        return state.get_tensor_model_parallel_size() if state.model_parallel_is_initialized() else 1


class _Nxd(NamedTuple):
    """What the lane uses of neuronx-distributed."""

    trace: Any
    compile: Any
    NxDModel: Any
    StateInitializer: Any
    parallel_state: Any


def _stateful(form: FunctionalForm, parameters: list[str]) -> torch.nn.Module:
    """The functional form as a module that has the mutated arguments as buffers.

    The builder reads the names of `forward`'s parameters and takes no `*args`, and every graph has its own: so the
    function is made from its text.
    """
    states, inputs = form.states(parameters), form.inputs(parameters)

    class Stateful(torch.nn.Module):
        def step(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
            results = form([getattr(self, state) for state in states], values)
            for state, new_value in zip(states, results):
                setattr(self, state, new_value)
            # A model returns something in every example of the documentation; a graph that only writes, one number.
            return results[len(states) :] or (values[-1].flatten()[:1],)

    signature = ", ".join(inputs)
    made: dict[str, Any] = {}
    exec(f"def forward(self, {signature}):\n    return self.step({signature})\n", made)
    Stateful.forward = made["forward"]
    module = Stateful()
    for state, tensor in zip(states, form.states(form.example)):
        module.register_buffer(state, tensor, persistent=False)
    return module


def _bound_initializer(base: Any, found: Any, ranks: int, states: dict[str, torch.Tensor]) -> Any:
    """A state initializer that gives rank 0 these tensors and the others new ones."""

    class BoundStates(base):
        def forward(self) -> list[dict[str, torch.Tensor]]:
            others = super().forward()[1:] if ranks > 1 else []
            return [dict(states), *others]

    return BoundStates(shapes=found.shapes, dtypes=found.dtypes, local_ranks_size=ranks)


def _identifier(name: str) -> str:
    """A flattened name as the name of a parameter: `deepstack[0]` as `deepstack_0`."""
    return name.replace("[", "_").replace("]", "")


def _import_package() -> _Nxd:
    try:
        from neuronx_distributed import NxDModel
        from neuronx_distributed.parallel_layers import parallel_state
        from neuronx_distributed.trace.model_builder import compile, trace
        from neuronx_distributed.trace.nxd_model.base_nxd_model import StateInitializer
    except ImportError as error:
        what = f"needs neuronx-distributed with ModelBuilderV2, and the torch-neuronx for torch-xla ({error})"
        remedy = (
            "Install both, of Neuron SDK 2.31 or earlier, in Python 3.10, 3.11 or 3.12: pip install "
            f"neuronx_distributed torch-neuronx==2.9.* neuronx-cc --extra-index-url {PACKAGE_INDEX}."
        )
        raise not_installed("nxd_builder", what, remedy) from error
    return _Nxd(trace, compile, NxDModel, StateInitializer, parallel_state)

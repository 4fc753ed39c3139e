"""Lanes: the ways in which a graph is lowered. Only modules in this folder import a compiler."""

from vllm_neuron_cache.graphs.lanes.base import Lane
from vllm_neuron_cache.graphs.lanes.check import CheckLane
from vllm_neuron_cache.graphs.lanes.eager import EagerLane
from vllm_neuron_cache.graphs.lanes.inductor import InductorLane
from vllm_neuron_cache.graphs.lanes.neuron import NeuronLane
from vllm_neuron_cache.graphs.lanes.neuronx_trace import NeuronxTraceLane
from vllm_neuron_cache.graphs.lanes.nxd_builder import NxdBuilderLane
from vllm_neuron_cache.graphs.lanes.xla import XlaLane

__all__ = [
    "CheckLane",
    "EagerLane",
    "InductorLane",
    "Lane",
    "NeuronLane",
    "NeuronxTraceLane",
    "NxdBuilderLane",
    "XlaLane",
    "make_lane",
]

_LANES: dict[str, type[Lane]] = {
    lane.name: lane
    for lane in (CheckLane, EagerLane, InductorLane, NeuronLane, NeuronxTraceLane, NxdBuilderLane, XlaLane)
}


def make_lane(name: str, kernel: str = "compiler") -> Lane:
    """A new lane by its configuration name, whose graphs move rows by `kernel`, one of `config.KERNELS`.

    Raises `KeyError` for a name that `config.LANES` does not list, `ConfigurationError` if its compiler or the
    kernels are missing, or the kernels cannot run in it.
    """
    return _LANES[name](kernel)

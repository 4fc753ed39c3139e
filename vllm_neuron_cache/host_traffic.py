"""What leaves a device for the host outside of a compiled graph, counted where torch dispatches."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from vllm_neuron_cache.graphs.lanes import Lane
from vllm_neuron_cache.graphs.lanes.base import Lowered
from vllm_neuron_cache.graphs.spec import GraphSpec


class Transfer(NamedTuple):
    """Bytes that went to the host in one operator."""

    operator: str
    dtype: str
    num_bytes: int
    is_embedding: bool
    """Whether they are numbers with a fraction, which ids, positions and flags never are."""


class HostTraffic(TorchDispatchMode):
    """Counts, while it is entered, what operators bring from the device to the host.

    On a device that is its tensors, by their device. With `device` "cpu" there is no border to cross, and the memory of
    `owned` stands for the device: any operator outside of a graph that takes some of it and gives other memory, or a
    number, counts as a read. What happens inside of a compiled graph is the compiler's and is not seen; nor is
    `Tensor.numpy()` of a CPU tensor, which torch does not dispatch.
    """

    def __init__(self, device: torch.device, owned: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self._device = device
        self._owned = {_address(tensor) for tensor in owned} if device.type == "cpu" else set()
        self.to_host: list[Transfer] = []
        self.launches: list[str] = []
        """Compiled graphs that ran."""

    @property
    def bytes_to_host(self) -> int:
        return sum(transfer.num_bytes for transfer in self.to_host)

    @property
    def embedding_bytes_to_host(self) -> int:
        return sum(transfer.num_bytes for transfer in self.to_host if transfer.is_embedding)

    @contextmanager
    def in_graph(self, name: str) -> Iterator[None]:
        """What runs in the block is one launch of that graph. Compilers must not see this mode either."""
        self.launches.append(name)
        with _disable_current_modes():
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sources = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        read = [tensor for tensor in sources if self._is_on_device(tensor)]
        if read:
            for output in tree_leaves(result):
                if isinstance(output, torch.Tensor) and not self._is_on_device(output):
                    self._note(func, output, output.nbytes)
                elif isinstance(output, bool | int | float):
                    self._note(func, read[0], read[0].dtype.itemsize)
        return result

    def _is_on_device(self, tensor: torch.Tensor) -> bool:
        if self._device.type != "cpu":
            return tensor.device.type == self._device.type
        return tensor.device.type == "cpu" and _address(tensor) in self._owned

    def _note(self, func: Any, tensor: torch.Tensor, num_bytes: int) -> None:
        dtype = tensor.dtype
        name = str(dtype).removeprefix("torch.")
        self.to_host.append(Transfer(str(func), name, num_bytes, dtype.is_floating_point or dtype.is_complex))


class WatchedLane(Lane):
    """A lane whose graphs tell `traffic` when they run; everything else is the lane's own."""

    traffic: HostTraffic | None = None
    """None watches nothing and costs nothing."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane  # and no counters: those are the lane's
        self.name = lane.name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lane, name)

    def lower(self, spec: GraphSpec, bucket: int, example_args: tuple[Any, ...]) -> Any:
        call = self._lane.lower(spec, bucket, example_args)

        def watched(*args: Any) -> Any:
            if self.traffic is None:
                return call(*args)
            with self.traffic.in_graph(spec.name):
                return call(*args)

        return watched

    def _lower(self, spec: GraphSpec, bucket: int, example_args: tuple[Any, ...]) -> Lowered:
        return self._lane._lower(spec, bucket, example_args)

    def seal(self) -> None:
        self._lane.seal()


def _address(tensor: torch.Tensor) -> int | None:
    # Those of a compiler that traces have no memory.
    return tensor.untyped_storage().data_ptr() if type(tensor) in (torch.Tensor, torch.nn.Parameter) else None

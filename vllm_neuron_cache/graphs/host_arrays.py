"""Small arrays on their way from the host to a graph."""

from collections.abc import Sequence

import numpy as np
import torch


class HostArrays:
    """Arrays that the host fills in each step, as tensors that a graph takes: one view per bucket, made once, so that a
    graph gets the same tensors in every step.

    On the CPU the tensors are the arrays. On a device they are copies, and `send` is the only traffic to it in a step.
    """

    def __init__(
        self, arrays: Sequence[np.ndarray | torch.Tensor], buckets: Sequence[int], device: torch.device
    ) -> None:
        """Each array has a first dimension of the largest bucket. Allocates their copies if there is a device."""
        self._host = {bucket: tuple(torch.as_tensor(array)[:bucket] for array in arrays) for bucket in buckets}
        self._device = self._host
        if device.type != "cpu":
            self._device = {
                bucket: tuple(torch.empty(view.shape, dtype=view.dtype, device=device) for view in views)
                for bucket, views in self._host.items()
            }

    def send(self, bucket: int) -> tuple[torch.Tensor, ...]:
        """The first `bucket` entries of each array, where the graph is. Mutates the copies on a device."""
        targets = self._device[bucket]
        if self._device is not self._host:
            for target, source in zip(targets, self._host[bucket]):
                target.copy_(source)
        return targets

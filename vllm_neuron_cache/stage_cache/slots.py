"""Slots of the staging buffers."""

from vllm_neuron_cache.errors import IntegrityError


class StagingSlots:
    """A slot is FREE, or held by a step until it is used and by a write until it is done.

    Not thread-safe: the controller calls it under the manager's lock.
    """

    def __init__(self, depth: int) -> None:
        self._holders = [0] * depth

    @property
    def num_free(self) -> int:
        return self._holders.count(0)

    def claim(self) -> int | None:
        """A free slot, now held once; None if there is none."""
        for slot, holders in enumerate(self._holders):
            if not holders:
                self._holders[slot] = 1
                return slot
        return None

    def hold(self, slot: int) -> None:
        """One more holder of a slot that is held."""
        if not self._holders[slot]:
            raise IntegrityError(f"staging slot {slot} is free and cannot be held along")
        self._holders[slot] += 1

    def release(self, slot: int) -> None:
        """One holder less; FREE after the last."""
        if not self._holders[slot]:
            raise IntegrityError(f"staging slot {slot} is released more often than it was held")
        self._holders[slot] -= 1

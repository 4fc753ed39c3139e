"""Which rows of each request the next stage has already."""

from collections.abc import Iterable, Sequence

import numpy as np

from vllm_neuron_cache.errors import IntegrityError, OmniPrefixCacheUnmatchError

_INITIAL_REQUESTS = 256


class DeliveryTracker:
    """A watermark per request, in absolute token positions: every row below it was handed on.

    A step hands on what lies between the watermark and the end of its own rows, whatever it computed. That is one rule
    for a new request with a hit (watermark 0, rows from the hit on), one that goes on, one that was preempted and comes
    back with a larger hit (some rows from the cache) or a smaller one (some rows a second time, which stay here).

    A request is LIVE from `admit` to `finish`. Not thread-safe: the manager calls it under its lock.
    """

    def __init__(self) -> None:
        self._index_of: dict[str, int] = {}
        self._free: list[int] = []
        self._delivered = np.zeros(0, dtype=np.int64)
        self._next_position = np.zeros(0, dtype=np.int64)
        self._restarted = np.zeros(0, dtype=bool)
        self._any_restarted = False
        self._speculating: set[str] = set()
        self._last_req_ids: Sequence[str] = ()
        self._last_indices = np.zeros(0, dtype=np.int64)

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._index_of

    def __len__(self) -> int:
        return len(self._index_of)

    def admit(self, req_id: str) -> None:
        """A new request, with nothing handed on."""
        if req_id in self._index_of:
            raise IntegrityError(f"request {req_id} is live and cannot be new")
        if not self._free:
            self._grow()
        index = self._free.pop()
        self._index_of[req_id] = index
        self._delivered[index] = self._next_position[index] = 0
        self._restarted[index] = False
        self._last_req_ids = ()

    def restart(self, req_id: str, num_tokens: int | None = None) -> None:
        """The next step of a live request may start anywhere: it was preempted, or another chunk of it arrived.

        `num_tokens` is how many it has, prompt and output, where that is known. The last of them was not computed yet:
        rows from there on were of drafts that were rejected.
        """
        index = self._index(req_id)
        self._restarted[index] = self._any_restarted = True
        if num_tokens is not None and req_id in self._speculating:
            self._delivered[index] = min(self._delivered[index], num_tokens - 1)
            self._next_position[index] = min(self._next_position[index], num_tokens - 1)

    def speculate(self, req_ids: Iterable[str]) -> None:
        """Steps of these requests have rows of drafts from now on."""
        self._speculating.update(req_ids)

    def finish(self, req_id: str) -> None:
        """Forgets a request; its id may come again. Nothing happens for one that is unknown."""
        index = self._index_of.pop(req_id, None)
        self._speculating.discard(req_id)
        if index is not None:
            self._free.append(index)
            self._last_req_ids = ()

    def delivered(self, req_id: str) -> int:
        """The watermark of a live request."""
        return int(self._delivered[self._index(req_id)])

    def plan(self, req_ids: Sequence[str], starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """The first position that each request of a step hands on; the last is the end of the step's rows. Moves the
        watermarks there.

        Whoever goes on and starts before the end of its last step rolls speculated tokens back: their rows are computed
        anew and handed on anew, so its watermark goes back with it.

        Args:
            req_ids: of the batch, in its order.
            starts: int64 `[R]`, first position that each computes.
            counts: int64 `[R]`, positions that each computes; 0 for one that is not scheduled and left alone.

        Returns:
            int64 `[R]`; `starts` itself if everybody goes on where it was. Raises `OmniPrefixCacheUnmatchError` for a
            request that is not live.
        """
        indices = self._indices(req_ids)
        stops = starts + counts
        first = self._delivered[indices]
        if (first == starts).all():  # everybody goes on where it was: nobody can have gone back
            self._delivered[indices] = self._next_position[indices] = stops
            self._settle(indices, counts)
            return starts
        goes_back = starts < self._next_position[indices]
        rolled_back = goes_back & ~self._restarted[indices] & (counts > 0)
        first[rolled_back] = starts[rolled_back]
        scheduled = counts > 0
        indices, stops = indices[scheduled], stops[scheduled]
        self._delivered[indices] = np.maximum(first[scheduled], stops)
        self._next_position[indices] = stops
        self._settle(indices, counts[scheduled])
        return first

    def check_integrity(self) -> None:
        """Raises `IntegrityError` if an index is used twice, or a request was handed less than it computed."""
        used = [*self._index_of.values(), *self._free]
        if sorted(used) != list(range(len(self._delivered))):
            raise IntegrityError(f"request indices {sorted(used)} are not 0 to {len(self._delivered) - 1}, each once")
        behind = [req for req, index in self._index_of.items() if self._delivered[index] < self._next_position[index]]
        if behind:
            raise IntegrityError(f"requests {behind} computed rows that no step hands on")

    def _settle(self, indices: np.ndarray, counts: np.ndarray) -> None:
        """Those that restarted have done so, if they were scheduled."""
        if self._any_restarted:
            self._restarted[indices[counts > 0]] = False
            self._any_restarted = bool(self._restarted.any())

    def _index(self, req_id: str) -> int:
        try:
            return self._index_of[req_id]
        except KeyError:
            raise OmniPrefixCacheUnmatchError(
                f"request {req_id} is in the batch and no new_step_starts announced it; call new_step_starts with "
                "every scheduler output, before the runner updates its states"
            ) from None

    def _indices(self, req_ids: Sequence[str]) -> np.ndarray:
        # While a batch decodes its requests are the same in every step.
        if req_ids != self._last_req_ids:
            self._last_indices = np.array([self._index(req_id) for req_id in req_ids], dtype=np.int64)
            self._last_req_ids = list(req_ids)
        return self._last_indices

    def _grow(self) -> None:
        old = len(self._delivered)
        new = max(_INITIAL_REQUESTS, 2 * old)
        for name in ("_delivered", "_next_position", "_restarted"):
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.zeros(new - old, dtype=array.dtype)]))
        self._free = list(range(new - 1, old - 1, -1))

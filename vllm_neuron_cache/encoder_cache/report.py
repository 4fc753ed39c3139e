"""What a worker tells the scheduler beside the tokens of a step: whom it could not serve, and what it has lost."""

from typing import NamedTuple


class WorkerEpochs(NamedTuple):
    """How often a worker has dropped all its rows by itself, and how often its weights have changed."""

    cache: int = 0
    weights: int = 0


class WorkerEntry(NamedTuple):
    """An entry of a worker's table, as far as the scheduler's pool knows it."""

    key: str
    generation: int
    block_ids: tuple[int, ...]
    written: bool


class RequestFailure(NamedTuple):
    """A request that read something else than its items' rows in the step."""

    request_id: str
    text: str
    """`RequestError.text`: what its client is told."""
    first_position: int
    """Token position in the request from which on its KV rows are wrong."""
    recompute: bool
    """The worker's rows are gone for a reason that lies with no request: it is computed again instead of failed."""


class StepReport(NamedTuple):
    """Travels with the output of a step. A step without anything to tell has none."""

    epochs: WorkerEpochs
    failed_items: tuple[str, ...]
    """Keys to be encoded again: the encoder failed, the entry is missing or damaged, or it could not be read."""
    failed_requests: tuple[RequestFailure, ...]


class ReportBuilder:
    """Collects what goes wrong in the step that a worker executes. `take` empties it."""

    def __init__(self) -> None:
        self.epochs = WorkerEpochs()
        self._known = WorkerEpochs()
        self._items: dict[str, None] = {}
        self._requests: dict[str, RequestFailure] = {}

    @property
    def scheduler_is_behind(self) -> bool:
        """Whether the step was scheduled before the scheduler knew that rows or weights here have changed."""
        return self._known < self.epochs

    def start_step(self, known: WorkerEpochs) -> None:
        """`known`: the epochs that the scheduler knew of when it made the step."""
        self._known = known

    def note_rows_lost(self) -> None:
        self.epochs = self.epochs._replace(cache=self.epochs.cache + 1)

    def note_weights_changed(self) -> None:
        self.epochs = WorkerEpochs(self.epochs.cache + 1, self.epochs.weights + 1)

    def fail_item(self, key: str) -> None:
        self._items[key] = None

    def fail_request(self, failure: RequestFailure) -> None:
        """The first failure of a request in a step is the one that is told."""
        self._requests.setdefault(failure.request_id, failure)

    def take(self) -> StepReport | None:
        """What happened since the last call, or None."""
        if not self._items and not self._requests and not self.scheduler_is_behind:
            return None
        report = StepReport(self.epochs, tuple(self._items), tuple(self._requests.values()))
        self._items.clear()
        self._requests.clear()
        return report

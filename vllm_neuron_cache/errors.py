"""Every public exception of the package.

A message says what is wrong, the sizes involved and the remedy. Classes that report a value that the caller can
change are also `ValueError`, so that code that knows nothing of this package still treats them as bad input.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple


class NeuronCacheError(Exception):
    """Base class of every error that this package raises."""


class ConfigurationError(NeuronCacheError, ValueError):
    """A configuration value, or a combination of them, that cannot work. Raised at start-up, never in a step."""


class PlannerError(NeuronCacheError, ValueError):
    """The planner cannot answer: a file, a size or a budget that it was given cannot be used."""


class ItemTooLargeError(NeuronCacheError, ValueError):
    """An item of a request needs more rows or blocks than the cache can ever give. The request is not queued."""


class ItemIdReusedError(NeuronCacheError, ValueError):
    """A client sent an id of its own again with media of another size. The request is not queued."""


class RequestError(NeuronCacheError):
    """Ends one request and no other. Its text reaches the client with the name of its class before it."""

    def __init__(self, message: str, *, request_id: str = "", key: str = "") -> None:
        """`request_id` and `key` name the request and the item concerned, where they are known."""
        super().__init__(message)
        self.request_id = request_id
        self.key = key

    @property
    def text(self) -> str:
        """Class and message, as `request_error` reads them."""
        return f"{type(self).__name__}: {self}"


class EncoderCacheReadError(RequestError):
    """A scheduled item cannot be read: its entry is missing, unwritten, or of another size than its placeholder."""


class EncoderOutputError(RequestError):
    """The encoder raised, or returned rows that do not fit the entry reserved for them (count, width, rank, NaN)."""


class StepProtocolError(NeuronCacheError):
    """Scheduler and worker no longer agree on the steps between them (a gap, or metadata that is missing)."""


class GraphRecompiledError(NeuronCacheError):
    """A graph was about to be compiled after warm-up: an input changed its shape, dtype, layout or mode."""


class GraphViolation(NamedTuple):
    """One breach of the rules of `graphs.check`."""

    rule: str
    node: str
    """The node of the graph, or the operator where tracing ended."""
    text: str


class GraphRuleError(NeuronCacheError):
    """A graph is not what a static compiler takes, or does not mutate what its spec says."""

    def __init__(self, graph: str, violations: Sequence[GraphViolation]) -> None:
        self.graph = graph
        self.violations = tuple(violations)
        found = "; ".join(f"[{rule}] {node}: {text}" for rule, node, text in self.violations)
        super().__init__(f"graph {graph}: {found}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.graph, self.violations)


class OmniPrefixCacheUnmatchError(NeuronCacheError, RuntimeError):
    """The stage cache cannot hand on what was asked for: a step id used twice, a request that nobody announced, rows
    that a failed write lost, a layout that it does not mirror. Named as vLLM-Omni names it."""

    def __init__(
        self,
        message: str,
        *,
        request_ids: Sequence[str] = (),
        reasons: Mapping[str, str] | None = None,
        outputs: Any = None,
    ) -> None:
        """`request_ids` are the requests that fail, `reasons` says of each what is wrong with its rows, and `outputs`
        (`StageCacheOutputs`) has what the others get."""
        super().__init__(message)
        self.reasons = dict(reasons or {})
        self.request_ids = tuple(request_ids or self.reasons)
        self.outputs = outputs


class OmniPrefixCacheStagingTimeoutError(OmniPrefixCacheUnmatchError):
    """A save waited for a staging slot in vain: steps were saved that nobody uses."""


class WrongRowsError(NeuronCacheError):
    """A request was handed rows that are not its own. A test or a benchmark found it, which knew the right ones."""


class PoolExhaustedError(NeuronCacheError):
    """Blocks were reserved without room for them: the caller did not ask `can_reserve` first."""


class IntegrityError(NeuronCacheError):
    """`check_integrity` found two records of the same thing that differ. A bug in this package."""


class AcceptanceError(NeuronCacheError):
    """The acceptance run cannot start here: a device, its driver or its packages are missing, or the deployment is too
    small for what is to be measured."""


class DemoError(NeuronCacheError):
    """The demo or a benchmark cannot run here (something is not installed, or a file is missing)."""


def request_error(text: object) -> RequestError | None:
    """The error whose `RequestError.text` this is, or None for anything else (`stop_reason` has many uses)."""
    name, separator, message = text.partition(": ") if isinstance(text, str) else ("", "", "")
    for cls in (EncoderCacheReadError, EncoderOutputError):
        if separator and name == cls.__name__:
            return cls(message)
    return None


def raise_request_errors(request_outputs: Iterable[Any]) -> None:
    """Raises the first `RequestError` among what vLLM's `LLM.generate` returned. Does nothing if none failed.

    vLLM itself reports a failed request as an output with `finish_reason` "error" and the text in `stop_reason`.
    """
    for request_output in request_outputs:
        for output in request_output.outputs:
            error = request_error(output.stop_reason) if output.finish_reason == "error" else None
            if error is not None:
                error.request_id = request_output.request_id
                raise error


class SimulationError(NeuronCacheError):
    """A simulated worker was told to do what a real one could not."""

"""What each output of a step is: rows for the cache, rows for this step alone, or something else."""

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_neuron_cache.errors import ConfigurationError
from vllm_neuron_cache.stage_cache.interface import HIDDEN_KEY
from vllm_neuron_cache.stage_cache.policy import KeySpec, ModelCachePolicy

if TYPE_CHECKING:
    from vllm_neuron_cache.stage_cache.row_store import RowStore

logger = logging.getLogger("vllm.neuron_cache")


class SortedOutputs(NamedTuple):
    """The outputs of a step. A tensor of rows has one per token, or more where it is padded."""

    immediate: dict[str, Any]
    """Key -> rows that are written as soon as they can be."""
    deferred: dict[str, Any]
    """Key -> rows that are written when their request finishes."""
    uncached: dict[str, Any]
    """Key -> rows that this step hands on and the cache cannot keep."""
    leftover: dict[str, Any]
    """Key -> what is passed through as it is."""
    broken: dict[str, str]
    """Key -> why it cannot be handed on at all."""


class OutputSorter:
    """Sorts by the policy's declarations, or discovers keys where the policy declares none. Opens keys in the store as
    they turn up."""

    def __init__(self, policy: ModelCachePolicy, store: "RowStore") -> None:
        """Opens the declared keys. Raises `ConfigurationError` if the store's limit does not allow them."""
        self._policy = policy
        self._store = store
        self._not_rows: set[str] = set()
        self._warned: set[KeySpec] = set()
        self._kept_forms: dict[str, tuple[Any, Any]] = {}
        self.refused: dict[str, str] = {}
        """Key -> why the store does not keep it, though it has a row per token."""
        store.open_keys(
            spec for spec in policy.specs.values() if spec.name != HIDDEN_KEY or policy.needs_full_hidden_states
        )

    def sort(self, hidden: Any, mm_outputs: Mapping[str, Any], num_rows: int, num_padded: int) -> SortedOutputs:
        """
        Args:
            hidden: `[num_rows or more, hidden]`, or None.
            mm_outputs: the other outputs by key.
            num_rows: tokens of the step.
            num_padded: the same, rounded up as the graph that computed them had it.
        """
        sorted_outputs = SortedOutputs({}, {}, {}, {}, {})
        if hidden is not None and num_rows and self._policy.needs_full_hidden_states:
            if hidden.ndim < 2 or hidden.shape[0] < num_rows:
                reason = f"it is {list(hidden.shape)} and the step has {num_rows} rows"
                sorted_outputs.broken[HIDDEN_KEY] = reason
            else:
                self._sort_rows(HIDDEN_KEY, hidden, sorted_outputs)
        for key, value in mm_outputs.items():
            if num_rows and self._has_rows(key, value, num_rows, num_padded, sorted_outputs.broken):
                self._sort_rows(key, value, sorted_outputs)
            elif key not in sorted_outputs.broken:
                sorted_outputs.leftover[key] = value
        return sorted_outputs

    def _has_rows(self, key: str, value: Any, num_rows: int, num_padded: int, broken: dict[str, str]) -> bool:
        """Whether `value` has a row per token. Adds to `broken` if it should and does not."""
        shape = value.shape if hasattr(value, "detach") else None
        fits = shape is not None and len(shape) > 0 and shape[0] in (num_rows, num_padded)
        if key == HIDDEN_KEY:
            broken[key] = "the name belongs to the hidden states; give the key another"
            return False
        if key in self._policy.specs:
            if not fits:
                found = type(value).__name__ if shape is None else list(shape)
                broken[key] = f"it is {found} and the step has {num_rows} rows ({num_padded} padded)"
            return fits
        if not self._policy.discovers or key in self._not_rows:
            return False
        if key in self._store.specs and not fits:
            logger.warning(
                "stage cache: %s is %s in a step of %d tokens: it has no row per token after all, and is passed "
                "through from now on. Declare the keys of the model",
                key, shape, num_rows,
            )  # fmt: skip
            self._not_rows.add(key)
            return False
        return fits and len(shape) > 1

    def _sort_rows(self, key: str, rows: Any, sorted_outputs: SortedOutputs) -> None:
        form = (rows.dtype, rows.shape[1:])
        if self._kept_forms.get(key) == form:  # as in the step before, nearly always
            is_kept = True
        else:
            is_kept = self._is_kept(KeySpec.of(key, rows))
            if is_kept:
                self._kept_forms[key] = form
        if is_kept:
            kind = sorted_outputs.deferred if key in self._policy.deferred_keys else sorted_outputs.immediate
        else:
            kind = sorted_outputs.uncached
        kind[key] = rows.detach() if rows.requires_grad else rows

    def _is_kept(self, spec: KeySpec) -> bool:
        """Whether the store keeps rows of this shape and dtype under this key; opens it if it is new."""
        kept = self._store.specs.get(spec.name)
        if kept is None and spec.name not in self.refused:
            try:
                spec.check()
                self._store.open_keys([spec])
            except (ConfigurationError, RuntimeError, MemoryError) as error:  # torch says RuntimeError for no memory
                self.refused[spec.name] = str(error)
                logger.warning("stage cache: %s is not cached: %s", spec.name, error)
            else:
                return True
        elif kept is not None and kept != spec and spec not in self._warned:
            self._warned.add(spec)
            logger.warning("stage cache: rows of %s are not cached where they are %s: %s", kept.name, spec, kept)
        return kept == spec

    @property
    def not_rows(self) -> set[str]:
        """Keys that were discovered and turned out to have no row per token."""
        return self._not_rows

"""What a stage cache counts."""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(kw_only=True, slots=True)
class StageCacheCounters:
    """Since the cache was made. A row is counted once for each key. Changed under the manager's lock."""

    rows_written: int = 0
    """Rows that reached the store."""
    bytes_written: int = 0
    rows_computed: int = 0
    """Rows that were handed on by the step that computed them."""
    rows_from_cache: int = 0
    """Rows that were handed on from the store, because of a hit."""
    bytes_from_cache: int = 0
    rows_absent: int = 0
    """Rows of a hit that its key never had: they were handed on as zeros."""
    rows_lost: int = 0
    """Rows of open keys that are not in the store: their write failed, or they were of another shape or dtype."""
    rows_copied_on_write: int = 0
    """Rows of a hit that were copied early because their block was about to get another tenant's."""
    staging_waits: int = 0
    """Saves that found no staging slot free."""
    write_waits: int = 0
    """Reads that waited for a write to end."""
    requests_failed: int = 0
    """Requests of a step whose rows could not be handed on."""


class StageCacheGauges(NamedTuple):
    """What a stage cache holds right now."""

    queued_writes: int
    """Writes of steps that are not in the store yet, deferred ones aside."""
    deferred_writes: int
    deferred_bytes: int
    """On the device."""
    pending_reads: int
    unused_steps: int
    """Saved, and neither materialized nor discarded."""

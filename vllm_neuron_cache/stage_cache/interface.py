"""What the stage cache takes and gives: its sizes, its outputs, the states of a write."""

import enum
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm_neuron_cache.errors import ConfigurationError

HIDDEN_KEY = "__hidden_states__"
"""Name of the hidden states among the keys; no model gives a tensor of its own this name."""


@dataclass(frozen=True, kw_only=True)
class PrefixCacheConfig:
    """Sizes of a stage cache and its limits. Raises `ConfigurationError` for a value that cannot work.

    The first seven names are vLLM-Omni's.
    """

    num_blocks: int
    """Blocks of vLLM's KV cache, whose slots the cache mirrors."""
    block_size: int
    """Token slots in one block."""
    gpu_staging_bytes: int = 512 * 2**20
    """Bytes of deferred rows that wait on the device; more than that are written before their requests finish."""
    staging_depth: int = 4
    """Steps that may be saved and neither materialized nor discarded. Each has one slot of the staging buffers."""
    staging_capacity_tokens: int = 1024
    """Rows of one staging slot: the most tokens that a step schedules."""
    staging_claim_timeout_s: float = 30.0
    """Seconds that a save waits for a staging slot, and a reader for a write, before either gives up."""
    copy_chunk_bytes: int = 16 * 2**20
    """Deferred rows leave the device in pieces of about this size, so that one request does not fill its queue."""
    host_bytes: int | None = None
    """Most bytes of host memory for rows and staging; None is no limit. What does not fit is refused."""
    device_bytes: int | None = None
    """Most bytes of device memory for rows; None is no limit. What does not fit is refused."""

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "staging_depth", "staging_capacity_tokens", "copy_chunk_bytes"):
            self._require(name, int, 1)
        self._require("gpu_staging_bytes", int, 0)
        self._require("staging_claim_timeout_s", (int, float), 0)
        for name in ("host_bytes", "device_bytes"):
            if getattr(self, name) is not None:
                self._require(name, int, 0)

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size

    def _require(self, name: str, types: Any, minimum: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, types) or isinstance(value, bool) or not minimum <= value < math.inf:
            raise ConfigurationError(f"stage cache: {name} is {value!r}; give a number of at least {minimum}.")


class StageCacheOutputs(NamedTuple):
    """What one step hands to the next stage."""

    hidden_states: dict[str, Any] | None
    """Request id -> host tensor `[rows, hidden]`, the rows not yet handed on. None if the step had no hidden states, or
    the policy does not cache them."""
    mm_outputs: dict[str, dict[str, Any]]
    """Key -> request id -> host tensor `[rows, *feature]` for a key with a row per token, else a copy of the value."""


class WriteState(enum.Enum):
    """State of a write. It moves down this list one step at a time, or to FAILED from any but the last."""

    PENDING = "pending"
    """Recorded; nobody may run it yet."""
    QUEUED = "queued"
    COPYING = "copying"
    """One thread has it; rows are on their way to the host."""
    HOST_READY = "host_ready"
    """Rows are in host memory."""
    WRITTEN = "written"
    """Rows are in the store."""
    FAILED = "failed"

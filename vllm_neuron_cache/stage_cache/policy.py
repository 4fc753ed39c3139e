"""Which tensors of a model the stage cache keeps, and what they take."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm_neuron_cache.errors import ConfigurationError
from vllm_neuron_cache.stage_cache.interface import HIDDEN_KEY, PrefixCacheConfig

DTYPE_BYTES = {
    "bfloat16": 2,
    "bool": 1,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "int8": 1,
    "uint8": 1,
}


class KeySpec(NamedTuple):
    """A tensor with one row per token."""

    name: str
    shape: tuple[int, ...]
    """Of one row; `()` for one number per token."""
    dtype: str
    """As torch writes it, without "torch."."""

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)} {self.dtype}"

    def check(self) -> None:
        """Raises `ConfigurationError` for rows of a shape or dtype that no store keeps."""
        if self.dtype not in DTYPE_BYTES or not all(isinstance(size, int) and size > 0 for size in self.shape):
            raise ConfigurationError(
                f"stage cache: key {self} cannot be kept; a row has sizes of at least 1 and one of the dtypes "
                f"{', '.join(DTYPE_BYTES)}."
            )

    @classmethod
    def of(cls, name: str, tensor: Any) -> "KeySpec":
        """The key whose rows `tensor` `[rows, *shape]` has."""
        return cls(name, tuple(tensor.shape[1:]), str(tensor.dtype).removeprefix("torch."))


@dataclass(frozen=True, kw_only=True)
class ModelCachePolicy:
    """What a model says of its outputs."""

    needs_full_hidden_states: bool = True
    """Whether the next stage needs the hidden states of the whole prompt."""
    deferred_keys: frozenset[str] = frozenset()
    """Keys whose rows may stay on the device until their request finishes."""
    keys: tuple[KeySpec, ...] | None = None
    """Every tensor with one row per token. What is not among them is passed through as it is, whatever its shape.
    None discovers them: a tensor of two dimensions or more whose first is the step's number of tokens. A tensor of
    another meaning can have that shape by chance, so declare the keys where you can."""
    specs: Mapping[str, KeySpec] = field(init=False, repr=False, compare=False)
    """`keys` by name; empty if they are discovered."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "deferred_keys", frozenset(self.deferred_keys))
        if self.keys is not None:
            object.__setattr__(self, "keys", tuple(KeySpec(name, tuple(shape), dt) for name, shape, dt in self.keys))
        specs = {spec.name: spec for spec in self.keys or ()}
        object.__setattr__(self, "specs", specs)
        for spec in specs.values():
            spec.check()
        if len(specs) != len(self.keys or ()):
            raise ConfigurationError(f"stage cache: a key is declared twice among {[str(spec) for spec in self.keys]}.")
        undeclared = self.deferred_keys - set(specs) if self.keys is not None else frozenset()
        if undeclared or HIDDEN_KEY in self.deferred_keys:
            raise ConfigurationError(
                f"stage cache: deferred_keys {sorted(self.deferred_keys)} must be declared in keys {sorted(specs)}, "
                "and hidden states cannot be deferred."
            )

    @property
    def discovers(self) -> bool:
        return self.keys is None

    @classmethod
    def from_model(cls, model: Any) -> "ModelCachePolicy":
        """Reads `requires_full_prefix_cached_hidden_states` and `deferred_prefix_cache_mm_keys`, which vLLM-Omni's
        models have, and `prefix_cache_keys`: `(name, shape of a row, dtype)` of every key."""
        keys = getattr(model, "prefix_cache_keys", None)
        return cls(
            needs_full_hidden_states=bool(getattr(model, "requires_full_prefix_cached_hidden_states", True)),
            deferred_keys=frozenset(getattr(model, "deferred_prefix_cache_mm_keys", None) or ()),
            keys=None if keys is None else tuple(keys),
        )


class KeyMemory(NamedTuple):
    """What one key takes, in bytes."""

    name: str
    pool_bytes: int
    """`num_blocks * block_size` rows."""
    staging_bytes: int
    """Rows of the steps in flight, where the store stages them."""

    @property
    def total_bytes(self) -> int:
        return self.pool_bytes + self.staging_bytes


def plan_memory(config: PrefixCacheConfig, specs: Iterable[KeySpec], *, staged: bool) -> tuple[KeyMemory, ...]:
    """Bytes per key, before anything is allocated. `staged` for a store that stages rows in host memory."""
    staging_rows = config.staging_depth * config.staging_capacity_tokens if staged else 0
    return tuple(
        KeyMemory(spec.name, config.num_slots * spec.row_bytes, staging_rows * spec.row_bytes) for spec in specs
    )


def check_memory(plan: Iterable[KeyMemory], limit: int | None, limit_name: str) -> None:
    """Raises `ConfigurationError` if `plan` takes more than `limit` bytes; `limit_name` is the key that sets it."""
    plan = tuple(plan)
    total = sum(key.total_bytes for key in plan)
    if limit is not None and total > limit:
        sizes = ", ".join(f"{key.name} {key.total_bytes:,}" for key in plan)
        raise ConfigurationError(
            f"stage cache: its rows take {total:,} bytes ({sizes}) and {limit_name} allows {limit:,}. Raise "
            f"{limit_name}, or lower the number of KV blocks."
        )

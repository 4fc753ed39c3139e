"""What is asked of the planner, and what it answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from vllm_neuron_cache.config import ENCODER_NAMESPACE, OWN_NAMESPACE, EncoderNeuronConfig
from vllm_neuron_cache.encoder_cache.sizing import CacheGeometry
from vllm_neuron_cache.errors import PlannerError
from vllm_neuron_cache.planner.items import MediaSize
from vllm_neuron_cache.planner.model import ModelShape

GIB = 1 << 30

DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048
"""`SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS` of vLLM 0.30.0, which its server takes on most devices."""

DEFAULT_STAGE_BLOCK_SIZE = 16
"""vLLM's usual KV block in tokens. The stage cache mirrors KV blocks."""


class SimulatedHits(NamedTuple):
    """What a simulator says of a cache under a load."""

    hit_rate: float
    """Share of items whose rows were found."""
    encoder_tokens_saved_fraction: float
    """Share of token rows that the encoder did not compute."""


class Simulator(Protocol):
    """Plays requests against a cache of a geometry."""

    def __call__(self, geometry: CacheGeometry, item_tokens: Sequence[int], reuse: float) -> SimulatedHits:
        """`item_tokens` has one entry per item of a typical mix; a share `reuse` of the items was seen before."""
        ...


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What a deployer says. Raises `PlannerError` for numbers that mean nothing."""

    sizes: tuple[MediaSize, ...]
    hbm_gib: float | None = None
    """GiB of HBM on each rank for the encoder cache; None takes as many blocks as vLLM's budget needs."""
    reuse: float | None = None
    """Share of requests for media seen before, 0 to 1."""
    tensor_parallel_size: int = 1
    max_num_batched_tokens: int = DEFAULT_MAX_NUM_BATCHED_TOKENS
    max_model_len: int | None = None
    """Tokens of the longest sequence; None takes the model's."""
    encode_ms_per_1k_tokens: float | None = None
    """Milliseconds that the encoder takes for 1000 token rows."""
    encoder_attention_block_size: int = EncoderNeuronConfig.encoder_attention_block_size
    """Patches in one attention block of the encoder."""
    kv_blocks: int | None = None
    """KV blocks of the engine, for the memory of the stage cache."""
    kv_block_size: int = DEFAULT_STAGE_BLOCK_SIZE

    def __post_init__(self) -> None:
        if not self.sizes:
            raise PlannerError("no sizes of media were given.")
        if self.reuse is not None and not 0 <= self.reuse <= 1:
            raise PlannerError(f"reuse is {self.reuse:g}; give the share of requests seen before, from 0 to 1.")
        for name, value in (("HBM in GiB", self.hbm_gib), ("encode time in ms", self.encode_ms_per_1k_tokens)):
            if value is not None and not 0 < value < float("inf"):
                raise PlannerError(f"{name} is {value:g}; give a number above 0.")
        for name in ("tensor_parallel_size", "max_num_batched_tokens", "max_model_len", "kv_blocks", "kv_block_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PlannerError(f"{name} is {value}; give a whole number of at least 1.")


class SizePlan(NamedTuple):
    """What one size of media means to the cache."""

    size: MediaSize
    tokens: int
    blocks: int
    resident: int
    """Items of this size that the cache holds at once, alone."""
    refused: bool
    """Whether requests with such an item are refused on arrival."""


class BlockSizePlan(NamedTuple):
    """The same buffer, in bytes, cut into blocks of one size."""

    block_size: int
    num_blocks: int
    """Scratch block included; 0 where the bytes are less than two blocks."""
    padding_waste: float
    """Share of the rows of occupied blocks that hold nothing, over the mix."""
    resident: int
    """Items of the mix, in its proportions, that the cache holds at once."""


class BufferPlan(NamedTuple):
    """What a number of blocks costs, and what it holds."""

    num_blocks: int
    """Scratch block included."""
    bytes_per_rank: int
    bytes_total: int
    """Over all tensor-parallel ranks: each holds a replica of the whole buffer."""
    resident: int
    """Items of the mix, in its proportions, that the cache holds at once."""


class StageKeyPlan(NamedTuple):
    """Host memory of one key of the stage cache."""

    name: str
    width: int
    dtype: str
    bytes_per_block: int
    bytes: int | None
    """For the KV blocks that were named, else None."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The answer. Sizes are in token rows and bytes unless a name says otherwise."""

    shape: ModelShape
    request: PlanRequest
    geometry: CacheGeometry
    num_blocks_needed: int
    """Blocks with which every item that vLLM admits fits an empty cache."""
    encoder_cache_size: int
    """vLLM's own budget: `max_num_batched_tokens`, or the largest item if that is more."""
    largest_items: dict[str, int]
    buffer: BufferPlan
    buffers: tuple[BufferPlan, ...]
    sizes: tuple[SizePlan, ...]
    block_sizes: tuple[BlockSizePlan, ...]
    mean_item_tokens: float
    simulated: SimulatedHits | None
    stage: tuple[StageKeyPlan, ...]
    warnings: tuple[str, ...]

    @property
    def block_bytes(self) -> int:
        return self.geometry.block_size * self.shape.row_bytes

    @property
    def encode_seconds_per_1000(self) -> float | None:
        """Seconds that the encoder takes for 1000 requests of one item each, without the cache."""
        if self.request.encode_ms_per_1k_tokens is None:
            return None
        return self.mean_item_tokens * self.request.encode_ms_per_1k_tokens / 1000

    @property
    def saved_seconds_per_1000(self) -> float | None:
        """Seconds of those that the cache saves."""
        if self.encode_seconds_per_1000 is None or self.simulated is None:
            return None
        return self.encode_seconds_per_1000 * self.simulated.encoder_tokens_saved_fraction

    @property
    def additional_config(self) -> dict[str, Any]:
        """For vLLM's `--additional-config`.

        A budget fixes the number of blocks. Without one the number is a floor, so that an engine that needs more
        takes more.
        """
        own: dict[str, Any] = {"encoder_cache_block_size": self.geometry.block_size}
        encoder: dict[str, Any] = {"encoder_attention_block_size": self.request.encoder_attention_block_size}
        if self.request.hbm_gib is None:
            encoder["encoder_cache_num_blocks"] = self.geometry.num_blocks
        else:
            own["encoder_cache_num_blocks_exact"] = self.geometry.num_blocks
        return {OWN_NAMESPACE: own, ENCODER_NAMESPACE: encoder}

    @property
    def vllm_arguments(self) -> dict[str, int | str]:
        """vLLM's own options that the plan counts on."""
        arguments: dict[str, int | str] = {
            "--dtype": self.shape.dtype,
            "--max-num-batched-tokens": self.request.max_num_batched_tokens,
        }
        if self.request.max_model_len is not None:
            arguments["--max-model-len"] = self.request.max_model_len
        if self.request.tensor_parallel_size > 1:
            arguments["--tensor-parallel-size"] = self.request.tensor_parallel_size
        return arguments

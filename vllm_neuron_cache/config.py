"""Typed configuration, read from vLLM's `additional_config`.

    {"encoder_neuron_config": {...}, "vllm_neuron_cache": {...}}

`encoder_neuron_config` has the names that vLLM Neuron uses, and may hold keys of the vendor's that mean nothing here;
they are left alone. Under `vllm_neuron_cache` everything is ours, and an unknown key is an error.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from vllm_neuron_cache.errors import ConfigurationError

OWN_NAMESPACE = "vllm_neuron_cache"
ENCODER_NAMESPACE = "encoder_neuron_config"
ENCODER_NAMESPACE_OLD = "vision_neuron_config"

HARDWARE_LANES = ("neuron", "neuronx_trace", "nxd_builder")
LANES = ("inductor", "eager", "check", "xla", *HARDWARE_LANES)
KERNELS = ("compiler", "nki")
EVICTION_POLICIES = ("lru", "gdsf")
STORES = ("host", "device")


@dataclass(frozen=True, kw_only=True)
class EncoderNeuronConfig:
    """The keys of vLLM Neuron's `encoder_neuron_config` that decide the layout of the cache.

    Source: the AWS Neuron documentation page "On-Device Encoder Cache".
    """

    encoder_attention_block_size: int = 2048
    """Patches in one attention block of the encoder, before the merger."""

    encoder_cache_num_blocks: int | None = None
    """A floor under the derived number of blocks, scratch block included. None derives it alone."""

    encoder_cache_min_hold_time_ms: int | None = None
    """Milliseconds that a block which an item gave up waits before reuse, for readers in other processes.
    None means 0 while every reader is in-process."""

    def __post_init__(self) -> None:
        name = ENCODER_NAMESPACE
        _require_int(name, "encoder_attention_block_size", self.encoder_attention_block_size, 1)
        _require_int(name, "encoder_cache_num_blocks", self.encoder_cache_num_blocks, 2, optional=True)
        _require_int(name, "encoder_cache_min_hold_time_ms", self.encoder_cache_min_hold_time_ms, 0, optional=True)


@dataclass(frozen=True, kw_only=True)
class StageCacheConfig:
    """Everything under `vllm_neuron_cache.stage_cache`."""

    store: str = "host"
    """Where rows are kept: in "host" memory, or on the "device", where graphs of the lane move them."""

    host_bytes: int | None = None
    """Most bytes of host memory for the rows, with their staging, of the "host" store. None is no limit. What does not
    fit is refused."""

    device_bytes: int | None = None
    """Most bytes of device memory for the rows of the "device" store. None is no limit. What does not fit is
    refused."""

    def __post_init__(self) -> None:
        name = f"{OWN_NAMESPACE}.stage_cache"
        if self.store not in STORES:
            raise ConfigurationError(f"{name}.store is {self.store!r}; give one of {', '.join(STORES)}.")
        for store in STORES:
            limit = f"{store}_bytes"
            _require_int(name, limit, getattr(self, limit), 0, optional=True)
            if getattr(self, limit) is not None and store != self.store:
                raise ConfigurationError(
                    f"{name}.{limit} limits a {store!r} store and {name}.store is {self.store!r}. Give "
                    f"{self.store}_bytes instead."
                )

    @classmethod
    def read(cls, values: Any) -> "StageCacheConfig | None":
        """From what stands under the key, None if nothing does. Raises `ConfigurationError` for an unknown key or an
        illegal value."""
        name = f"{OWN_NAMESPACE}.stage_cache"
        if values is None or isinstance(values, cls):
            return values
        if not isinstance(values, Mapping):
            raise ConfigurationError(
                f"{name} is {values!r}; give an object of keys and values, {{}} for the defaults, or null."
            )
        _require_known(name, values, [spec.name for spec in fields(cls)])
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class NeuronCacheConfig:
    """Everything under `vllm_neuron_cache`, with the encoder's keys beside it."""

    encoder: EncoderNeuronConfig = field(default_factory=EncoderNeuronConfig)

    encoder_cache_block_size: int | None = None
    """Token rows in one cache block: any divisor of the encoder's block (attention block over merge factor). None
    chooses by the smallest image that the model's processor makes: a quarter of its rows or less, but no less than 16.
    Where a number of blocks is configured, and under the vendor's plugin, None is the encoder's block itself."""

    encoder_cache_num_blocks_exact: int | None = None
    """Fixes the number of blocks, scratch block included, instead of deriving it."""

    eviction: str = "lru"
    """Which item goes first when room is needed: "lru" the one needed least recently, "gdsf" the one whose blocks save
    the least encoding (greedy dual size frequency)."""

    lane: str = "inductor"
    """How graphs are lowered: "inductor" compiles them, "eager" runs the reference. "check" holds them to the rules and
    runs what the rules saw, "xla" proves that XLA updates in place: both are slow. The others are for Trainium, and
    were not run on one yet: "neuron" is torch.compile, "neuronx_trace" and "nxd_builder" are the older stack."""

    kernel: str = "compiler"
    """What moves rows into the cache and out of it: "compiler" leaves it to the lane's compiler, "nki" calls kernels
    written by hand, in the lanes for Trainium alone; those were not run on one yet."""

    compiled_encoder: bool = False
    """Whether the model's encoders run as static graphs that write into the cache by themselves. An image, or a frame
    of a video, of more patches than `encoder_attention_block_size` is refused then. For Qwen3-VL, Qwen2.5-VL and
    Qwen2.5-Omni."""

    compiled_prefill: bool = False
    """Whether cached rows are merged inside the language model's own compiled forward, instead of by a graph before it.
    Steps of text alone run without a merge. For Qwen3-VL, dense and mixture of experts."""

    stage_cache: StageCacheConfig | None = None
    """Keeps what a stage of vLLM-Omni hands to the next one, so that it follows the hits of vLLM's prefix cache. An
    object with the keys of `StageCacheConfig`; None leaves vLLM-Omni's own cache in its place."""

    def __post_init__(self) -> None:
        _require_int(OWN_NAMESPACE, "encoder_cache_block_size", self.encoder_cache_block_size, 1, optional=True)
        _require_int(
            OWN_NAMESPACE, "encoder_cache_num_blocks_exact", self.encoder_cache_num_blocks_exact, 2, optional=True
        )
        if self.encoder_cache_num_blocks_exact is not None and self.encoder.encoder_cache_num_blocks is not None:
            raise ConfigurationError(
                f"{OWN_NAMESPACE}.encoder_cache_num_blocks_exact ({self.encoder_cache_num_blocks_exact}) fixes the "
                f"number of blocks and {ENCODER_NAMESPACE}.encoder_cache_num_blocks "
                f"({self.encoder.encoder_cache_num_blocks}) is a floor under it. Give one of the two."
            )
        _require_bool(OWN_NAMESPACE, "compiled_encoder", self.compiled_encoder)
        _require_bool(OWN_NAMESPACE, "compiled_prefill", self.compiled_prefill)
        for name, allowed in (("eviction", EVICTION_POLICIES), ("lane", LANES), ("kernel", KERNELS)):
            if getattr(self, name) not in allowed:
                raise ConfigurationError(
                    f"{OWN_NAMESPACE}.{name} is {getattr(self, name)!r}; give one of {', '.join(allowed)}."
                )
        require_kernel(self.kernel, self.lane)

    @property
    def fixes_num_blocks(self) -> bool:
        """Whether a number of blocks is configured, as a floor or exactly."""
        return self.encoder.encoder_cache_num_blocks is not None or self.encoder_cache_num_blocks_exact is not None

    @classmethod
    def from_additional_config(cls, additional_config: Mapping[str, Any] | None) -> "NeuronCacheConfig":
        """Reads both namespaces. Raises `ConfigurationError` for an unknown key of ours or an illegal value."""
        if not isinstance(additional_config, Mapping | None):
            raise ConfigurationError(f"additional_config is {additional_config!r}; give an object of keys and values.")
        additional_config = additional_config or {}
        own = _namespace(additional_config, OWN_NAMESPACE)
        own_keys = [spec.name for spec in fields(cls) if spec.name != "encoder"]
        _require_known(OWN_NAMESPACE, own, own_keys)
        stage_cache = StageCacheConfig.read(own.get("stage_cache"))
        return cls(encoder=_encoder_config(additional_config), **{**own, "stage_cache": stage_cache})


def require_kernel(kernel: str, lane: str) -> None:
    """Raises `ConfigurationError` unless graphs of `lane` can call `kernel`, one of `KERNELS`."""
    if kernel == "nki" and lane not in HARDWARE_LANES:
        raise ConfigurationError(
            f"{OWN_NAMESPACE}.kernel is 'nki', whose kernels run on a Trainium alone, and the lane is {lane!r}. Set "
            f"{OWN_NAMESPACE}.lane to one of {', '.join(HARDWARE_LANES)}, or {OWN_NAMESPACE}.kernel to 'compiler'."
        )


def is_enabled(additional_config: Any) -> bool:
    """Whether `additional_config` holds our key, which is all that turns the cache on."""
    return isinstance(additional_config, Mapping) and OWN_NAMESPACE in additional_config


def _encoder_config(additional_config: Mapping[str, Any]) -> EncoderNeuronConfig:
    if ENCODER_NAMESPACE in additional_config and ENCODER_NAMESPACE_OLD in additional_config:
        raise ConfigurationError(
            f"additional_config has {ENCODER_NAMESPACE} and {ENCODER_NAMESPACE_OLD}, its older name. Give one of them."
        )
    name = ENCODER_NAMESPACE_OLD if ENCODER_NAMESPACE_OLD in additional_config else ENCODER_NAMESPACE
    values = _namespace(additional_config, name)
    known = {spec.name for spec in fields(EncoderNeuronConfig)}
    return EncoderNeuronConfig(**{key: value for key, value in values.items() if key in known})


def _namespace(additional_config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    values = additional_config.get(name, {})
    if not isinstance(values, Mapping):
        raise ConfigurationError(
            f"additional_config[{name!r}] is {values!r}; give an object of keys and values, {{}} for the defaults."
        )
    return values


def _require_int(namespace: str, name: str, value: Any, minimum: int, *, optional: bool = False) -> None:
    if optional and value is None:
        return
    # bool is an int in Python, but `true` for a size is a mistake worth catching.
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        alternative = " or null" if optional else ""
        raise ConfigurationError(
            f"{namespace}.{name} is {value!r}; give a whole number of at least {minimum}{alternative}."
        )


def _require_bool(namespace: str, name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ConfigurationError(f"{namespace}.{name} is {value!r}; give true or false.")


def _require_known(namespace: str, values: Mapping[str, Any], keys: list[str]) -> None:
    for key in values:
        if key not in keys:
            raise ConfigurationError(
                f"{namespace}.{key} is not a configuration key.{_did_you_mean(key, keys)} "
                f"The keys are {', '.join(keys)}."
            )


def _did_you_mean(key: Any, keys: list[str]) -> str:
    nearest = difflib.get_close_matches(str(key), keys, n=1)
    return f" Did you mean {nearest[0]!r}?" if nearest else ""

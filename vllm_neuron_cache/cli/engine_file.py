"""The file that `vllm serve --config` takes, as far as it decides what is compiled."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from vllm_neuron_cache.config import NeuronCacheConfig, is_enabled
from vllm_neuron_cache.errors import ConfigurationError
from vllm_neuron_cache.planner.values import DEFAULT_MAX_NUM_BATCHED_TOKENS


@dataclass(frozen=True, kw_only=True)
class EngineFile:
    """Engine arguments of a deployment. Those that it does not name have vLLM's defaults."""

    model: str
    config: NeuronCacheConfig
    max_num_batched_tokens: int = DEFAULT_MAX_NUM_BATCHED_TOKENS
    max_model_len: int | None = None
    dtype: str = "auto"


def read_engine_file(path: Path) -> EngineFile:
    """Reads YAML with vLLM's argument names, dashes or underscores alike; other arguments are vLLM's and left alone.

    Raises `ConfigurationError` for a file that cannot be read, names no model or no `vllm_neuron_cache` key, or has a
    value of the wrong kind.
    """
    try:
        values = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}.") from error
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{path} is not YAML: {error}") from error
    if not isinstance(values, Mapping):
        raise ConfigurationError(f"{path} holds no engine arguments; give `name: value` lines as for vllm serve.")
    arguments = {str(name).replace("-", "_"): value for name, value in values.items()}
    additional_config = arguments.get("additional_config")
    if not is_enabled(additional_config):
        raise ConfigurationError(f"{path}: additional-config has no vllm_neuron_cache key, so the cache is off.")
    return EngineFile(
        model=_value(path, arguments, "model", str, None),
        config=NeuronCacheConfig.from_additional_config(additional_config),
        max_num_batched_tokens=_value(path, arguments, "max_num_batched_tokens", int, DEFAULT_MAX_NUM_BATCHED_TOKENS),
        max_model_len=_value(path, arguments, "max_model_len", int, 0) or None,
        dtype=_value(path, arguments, "dtype", str, "auto"),
    )


def _value(path: Path, arguments: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = arguments.get(name, default)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ConfigurationError(f"{path}: {name.replace('_', '-')} is {value!r}; give {kind.__name__}.")
    return value

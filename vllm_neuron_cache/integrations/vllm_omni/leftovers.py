"""What a step puts out beside rows: the share of it that each request gets, as vLLM-Omni deals it out."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from vllm_neuron_cache.stage_cache import ModelCachePolicy


class SplitOutputs(NamedTuple):
    rows: dict[str, Any]
    """For the stage cache: what has a row per token, or should have."""
    leftovers: dict[str, Any]
    """For the requests of this step alone."""


def split_outputs(policy: ModelCachePolicy, outputs: Mapping[str, Any], sizes: tuple[int, int]) -> SplitOutputs:
    """Splits a step's outputs by the policy's declarations, or by shape where it has none. `sizes` are the step's
    tokens and the same with padding."""
    split = SplitOutputs({}, {})
    for key, value in outputs.items():
        if policy.discovers:
            is_rows = isinstance(value, torch.Tensor) and value.ndim > 1 and len(value) in sizes
        else:
            is_rows = key in policy.specs
        (split.rows if is_rows else split.leftovers)[key] = value
    return split


def share_of(value: Any, rows: slice, sizes: tuple[int, int]) -> Any:
    """What the request whose tokens are at `rows` gets of a leftover, in memory of its own: its part of a tensor with
    as many entries as the step has tokens, a list as it is (vLLM-Omni takes the request's element later), the shares of
    each member of a mapping, and everything else whole."""
    if isinstance(value, torch.Tensor):
        return value[rows].clone() if value.ndim and len(value) in sizes else value.clone()
    if isinstance(value, Mapping):
        return {name: share_of(member, rows, sizes) for name, member in value.items()}
    if isinstance(value, list):
        return [member.clone() if isinstance(member, torch.Tensor) else member for member in value]
    return value

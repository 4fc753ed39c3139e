"""Values of any shape with tensors in them."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


def map_tensors(value: Any, function: Callable[[Any], Any]) -> Any:
    """`value` with `function` of each tensor and a copy of each array in it, in mappings, lists and tuples too;
    everything else as it is."""
    if hasattr(value, "detach"):
        return function(value.detach())
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, Mapping):
        return {name: map_tensors(member, function) for name, member in value.items()}
    if isinstance(value, list):
        return [map_tensors(member, function) for member in value]
    if isinstance(value, tuple):
        members = [map_tensors(member, function) for member in value]
        return type(value)(*members) if hasattr(value, "_fields") else tuple(members)
    return value

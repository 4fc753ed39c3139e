"""How this package puts itself around methods and functions of vLLM's."""

import functools
from collections.abc import Callable
from typing import Any


def wrap_once(owner: Any, name: str, make_wrapper: Callable[[Any], Any]) -> None:
    """Replaces `owner.name` by `make_wrapper(owner.name)`, unless that was done before. Mutates `owner`, a class or a
    module.

    Raises `AttributeError` if there is nothing of that name.
    """
    original = getattr(owner, name)
    if getattr(original, "_neuron_cache", False):
        return
    wrapper = functools.wraps(original)(make_wrapper(original))
    wrapper._neuron_cache = True
    setattr(owner, name, wrapper)

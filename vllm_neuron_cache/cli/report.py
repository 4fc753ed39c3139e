"""Writing results."""

import json
from pathlib import Path
from typing import Any

from vllm_neuron_cache.errors import DemoError


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes `value` to `path`. Raises `DemoError` if that is impossible."""
    try:
        path.write_text(json.dumps(value, indent=2) + "\n")
    except OSError as error:
        raise DemoError(f"cannot write {path}: {error.strerror}. Name a file in a folder that exists.") from error

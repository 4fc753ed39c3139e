"""Writing results."""

import json
import os
from pathlib import Path
from typing import Any

from vllm_neuron_cache.errors import DemoError


def check_writable(*paths: Path | None) -> None:
    """Raises `DemoError`, before any work is done, if one of the files that were named cannot be written."""
    for path in paths:
        if path is not None and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
            raise DemoError(f"cannot write {path}. Name a file in a folder that exists and may be written.")


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes `value` to `path`."""
    path.write_text(json.dumps(value, indent=2) + "\n")

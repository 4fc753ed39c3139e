"""The two commands of the README."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
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


def test_the_whole_suite_runs_the_tests_with_vllm_omni():
    """The script runs them itself, in an environment that this one must not build while it runs."""
    assert '"$repo_root/scripts/omni_env" || status=$?' in (ROOT / "scripts/test").read_text()
    assert "set -- pytest -m omni tests/stage_cache" in (ROOT / "scripts/omni_env").read_text()


def test_the_environment_of_vllm_omni_runs_a_command():
    """Where it was made."""
    if not (ROOT / ".cache/envs/omni/.complete").exists():
        pytest.skip("scripts/omni_env was not run here: the whole suite makes its environment beside this test")
    command = [ROOT / "scripts/omni_env", "python", "-m", "vllm_neuron_cache.cli", "bench", "stage-cache", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "vLLM-Omni" in result.stdout


PARTS = ("python", "scripts/xla_env", "scripts/omni_env", "scripts/other_pythons")
"""What runs the tests, in the order in which it prints."""


def stand_in(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def stand_ins(tmp_path):
    """A repository with the script that runs the suite, and stand-ins for all that it calls."""
    script = tmp_path / "scripts/test"
    stand_in(script, (ROOT / "scripts/test").read_text())
    stand_in(
        tmp_path / "scripts/lib/environment.sh",
        f"repo_root={tmp_path} venv_python={tmp_path}/python\nprepare_environment() {{ :; }}\nset_offline() {{ :; }}\n"
        'say() { echo "$*"; }',
    )
    for name in PARTS:
        stand_in(tmp_path / name, f"echo ran {name}")
    return tmp_path


@pytest.mark.parametrize("failing", [*PARTS, None])
def test_the_suite_fails_with_any_of_its_parts_and_runs_all_of_them(stand_ins, failing):
    if failing:
        stand_in(stand_ins / failing, f"echo ran {failing}; exit 7")
    result = subprocess.run([stand_ins / "scripts/test"], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (7 if failing else 0, "")
    ran = [line for line in result.stdout.splitlines() if line.startswith("ran ")]
    assert ran == [f"ran {name}" for name in PARTS]


def test_an_interrupted_suite_leaves_nothing_running(stand_ins):
    stand_in(stand_ins / "scripts/xla_env", f"sleep 600 & echo $! >{stand_ins}/pid; wait")
    stand_in(stand_ins / "python", f"until [[ -s {stand_ins}/pid ]]; do sleep 0.1; done; exit 2")
    result = subprocess.run([stand_ins / "scripts/test"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    pid, end = int((stand_ins / "pid").read_text()), time.monotonic() + 20
    while runs(pid) and time.monotonic() < end:
        time.sleep(0.1)
    assert not runs(pid)


def runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


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
        "scripts/omni_env",
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

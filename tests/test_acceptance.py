"""The acceptance run: on a CPU every check passes, each can fail and is named, and without a device it says what is
missing."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from vllm_neuron_cache.acceptance import run as acceptance_run
from vllm_neuron_cache.acceptance import tokens as token_check
from vllm_neuron_cache.acceptance.device_checks import MERGE_LIMIT_MS, NUM_IMAGES, check_device, require_room
from vllm_neuron_cache.acceptance.machine import chip_of, instance_type, require_device
from vllm_neuron_cache.acceptance.report import CHECKS, Check, Report
from vllm_neuron_cache.acceptance.run import run_acceptance
from vllm_neuron_cache.cli.engine_file import read_engine_file
from vllm_neuron_cache.cli.main import app
from vllm_neuron_cache.config import NeuronCacheConfig
from vllm_neuron_cache.errors import AcceptanceError
from vllm_neuron_cache.graphs.deployment import plan_deployment
from vllm_neuron_cache.graphs.lanes import make_lane
from vllm_neuron_cache.graphs.lanes.inductor import compiler_available
from vllm_neuron_cache.planner.model import load_model_shape
from vllm_neuron_cache.runtime import EncoderCacheRuntime

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts/trn_acceptance"
CPU = torch.device("cpu")
NO_LIMIT_MS = 1e6
"""Machines that run tests are slow at times; that the limit is kept has a test of its own."""

needs_compiler = pytest.mark.skipif(not compiler_available(), reason="inductor needs a C++ compiler, and there is none")
without_device = pytest.mark.skipif(
    instance_type() is not None or importlib.util.find_spec("torch_neuronx") is not None,
    reason="there is a Neuron device or its packages here",
)


def deployment_of(checkpoint, *, max_num_batched_tokens=8192, **cache):
    config = NeuronCacheConfig.from_additional_config({"vllm_neuron_cache": cache})
    return plan_deployment(load_model_shape(checkpoint), config, max_num_batched_tokens=max_num_batched_tokens)


@pytest.fixture(scope="module")
def deployment(checkpoint):
    return deployment_of(checkpoint)


@pytest.fixture(scope="module")
def started_pair(checkpoint):
    """Stock vLLM, vLLM with the cache, and the media that the check of tokens asks about."""
    from vllm_neuron_cache.demo.comparison import load_media, start_pair

    media = load_media()
    pair = start_pair(checkpoint, {"lane": "eager"}, media, lambda text: None)
    yield *pair, media
    for engine in pair:
        engine.close()


@pytest.fixture
def engine_pair(started_pair):
    """With nothing cached. No more than one test may move the cache: moves nest."""
    for engine in started_pair[:2]:
        engine.llm.reset_prefix_cache()
        engine.llm.reset_mm_cache()
        engine.llm.llm_engine.reset_encoder_cache()
    return started_pair


def checks_of(deployment, lane="eager", *, limit_ms=NO_LIMIT_MS):
    lane = make_lane(lane) if isinstance(lane, str) else lane
    return {check.name: check for check in check_device(deployment, lane, CPU, rounds=3, limit_ms=limit_ms)}


def failed(checks):
    return {name for name, check in checks.items() if not check.passed}


def plant(monkeypatch, after, method="merge"):
    """Has `after` run whenever a step has merged, or written."""
    original = getattr(EncoderCacheRuntime, method)

    def planted(runtime, *args):
        original(runtime, *args)
        after(runtime)

    monkeypatch.setattr(EncoderCacheRuntime, method, planted)


# Every check passes, and can fail ------------------------------------------------------------------------------


@pytest.mark.parametrize("lane", ["eager", pytest.param("inductor", marks=needs_compiler)])
def test_a_cpu_passes_every_check_of_the_device_path(deployment, lane):
    checks = checks_of(deployment, lane)
    assert failed(checks) == set() and set(checks) == set(CHECKS) - {"tokens_equal"}
    traffic = checks["no_embedding_to_host"].values
    assert traffic["launches"] > 180 and traffic["bytes_in_reads"] == 0  # three for each of 60 images, and merges
    assert {"buffer", "hidden", "deepstack[2]"} <= set(checks["stable_pointers"].values["looked_at"])
    assert checks["merge_time"].values["rounds"] == 3


@needs_compiler
def test_a_merge_on_this_cpu_is_far_below_the_limit(deployment):
    """With rows 40 times narrower than those of the published figure."""
    assert checks_of(deployment, "inductor")["merge_time"].values["least_ms"] < MERGE_LIMIT_MS


def test_a_slow_merge_is_named(deployment, monkeypatch):
    plant(monkeypatch, lambda runtime: time.sleep(0.1))
    checks = checks_of(deployment, limit_ms=90)
    assert failed(checks) == {"merge_time"} and checks["merge_time"].values["median_ms"] >= 100
    assert "at most 90 ms" in checks["merge_time"].text


def test_a_moved_buffer_is_named(deployment, monkeypatch):
    def move(runtime):
        # Behind torch's back: a clone would count as a read as well.
        copy = runtime.blocks.buffer.view(torch.int16).numpy().copy()
        runtime.blocks.buffer = torch.from_numpy(copy).view(runtime.blocks.buffer.dtype)

    plant(monkeypatch, move)
    checks = checks_of(deployment)
    assert failed(checks) == {"stable_pointers"}
    assert checks["stable_pointers"].text == "at another address than after warm-up: buffer"


@needs_compiler
def test_a_compilation_after_warm_up_is_named(deployment, monkeypatch):
    lane = make_lane("inductor")
    spec = next(spec for spec in deployment.specs if spec.name == "encoder_stamp")
    plant(monkeypatch, lambda runtime: lane._lower(spec, 4, spec.example_args(4)))
    checks = checks_of(deployment, lane)
    assert failed(checks) == {"nothing_compiled_after_warm_up"}
    assert checks["nothing_compiled_after_warm_up"].values["after_warm_up"] > 0


@needs_compiler
def test_a_call_that_would_need_a_compilation_is_named(deployment, monkeypatch):
    def call_with_another_shape(runtime):
        hidden, deepstack = runtime.targets
        (merge,) = (graph for graph in runtime.graphs if graph.spec.name == "merge_rows")
        rows = torch.zeros(64, dtype=torch.int32)
        merge.run(64, hidden[:-1], deepstack, runtime.blocks.buffer, rows, rows)

    plant(monkeypatch, call_with_another_shape)
    checks = checks_of(deployment, "inductor")
    assert failed(checks) == {"nothing_compiled_after_warm_up", "rows_exact", "merge_time"}  # the run ends there
    assert "merge_rows, bucket 64" in checks["nothing_compiled_after_warm_up"].text


READS = {
    "item": lambda runtime: runtime.targets.hidden[0, 0].item(),
    "a copy": lambda runtime: torch.zeros(1, runtime.blocks.fat_dim).copy_(runtime.blocks.buffer[0, :1]),
    "a clone": lambda runtime: runtime.targets.hidden[:1].clone(),
    "a comparison": lambda runtime: torch.equal(runtime.targets.hidden[:1], runtime.targets.hidden[1:2]),
    "a gather outside of a graph": lambda runtime: runtime.blocks.buffer.index_select(0, torch.tensor([0])),
}


@pytest.mark.parametrize("method", ["merge", "write"])
@pytest.mark.parametrize("read", READS)
def test_a_read_of_embeddings_by_the_host_is_named(deployment, monkeypatch, read, method):
    plant(monkeypatch, READS[read], method)
    checks = checks_of(deployment)
    assert failed(checks) == {"no_embedding_to_host"}
    assert "aten." in checks["no_embedding_to_host"].text


def test_ids_may_be_read_where_items_are_written_and_nowhere_else(deployment, monkeypatch):
    def read_tag(runtime):
        return runtime.blocks.mm_hash_tags[0, 0].item()

    plant(monkeypatch, read_tag, "write")
    traffic = checks_of(deployment)["no_embedding_to_host"]
    assert traffic.passed and traffic.values["flag_bytes_in_writes"] == 4 * 2 * NUM_IMAGES
    plant(monkeypatch, read_tag, "merge")
    assert failed(checks_of(deployment)) == {"no_embedding_to_host"}


@pytest.mark.parametrize("level", ["hidden", "deepstack[1]"])
def test_a_wrong_row_is_named(deployment, monkeypatch, level):
    plant(monkeypatch, lambda runtime: (runtime.targets[0], *runtime.targets[1])[0 if level == "hidden" else 2].add_(1))
    checks = checks_of(deployment)
    assert failed(checks) == {"rows_exact"} and f"{level}, 30 images" in checks["rows_exact"].text


@pytest.mark.vllm
@pytest.mark.slow
def test_other_tokens_are_named(checkpoint, engine_pair, monkeypatch):
    """That the same engines pass unharmed, the documented run shows."""
    from vllm_neuron_cache.demo.requests import MediaRequest

    stock, blocks, media = engine_pair
    with monkeypatch.context() as patch:
        patch.setattr(EncoderCacheRuntime, "merge", lambda runtime, plan: None)
        other = token_check.serve_and_compare(stock, blocks, media, checkpoint)
    assert not other.passed and 0 in other.values["differing_requests"]

    # Equal tokens are no proof where nothing of the cache was read.
    monkeypatch.setattr(token_check, "token_requests", lambda: [MediaRequest(after="Who are you?")])
    text_alone = token_check.serve_and_compare(stock, blocks, media, checkpoint)
    assert not text_alone.passed and text_alone.values["differing_requests"] == []


# The whole run ---------------------------------------------------------------------------------------------------


@pytest.mark.vllm
@pytest.mark.slow
@needs_compiler
def test_the_documented_run_on_a_cpu(checkpoint, engine_pair, tmp_path, monkeypatch):
    """In this process, with the engines of the tests of tokens in the place of those that it would start and close.

    That the script starts, `test_without_a_device_it_says_everything_that_is_missing` shows.
    """
    *pair, _ = engine_pair
    closed = []
    for engine in pair:
        monkeypatch.setattr(engine, "close", lambda engine=engine: closed.append(engine))

    def started(model, cache, media, step):
        assert (model, cache) == (checkpoint, {"lane": "eager"})
        return pair

    monkeypatch.setattr(token_check, "start_pair", started)
    (tmp_path / "engine.yaml").write_text(
        f"model: {checkpoint}\nmax-num-batched-tokens: 8192\nadditional-config: {{vllm_neuron_cache: {{}}}}\n"
    )
    line = "scripts/trn_acceptance --config engine.yaml --lane inductor --device cpu --json acceptance.json"
    assert line in (ROOT / "docs/trainium.md").read_text()
    monkeypatch.chdir(tmp_path)
    run = CliRunner().invoke(app, ["acceptance", *line.split()[1:]])
    assert (tmp_path / "acceptance.json").exists(), (run.output, run.exception)
    report = json.loads((tmp_path / "acceptance.json").read_text())
    slow = {name for name, check in report["checks"].items() if not check["passed"]}
    assert slow <= {"merge_time"}, report["checks"]  # a busy machine may be late
    assert run.exit_code == (1 if slow else 0), run.exception
    assert set(report["checks"]) == set(CHECKS) and closed == pair
    assert report["checks"]["tokens_equal"]["values"]["hits"] >= 5
    assert report["hardware_result"] is False and "NO HARDWARE RESULT: lane inductor on device cpu" in report["note"]
    assert (report["lane"], report["device"], report["hardware"]) == ("inductor", "cpu", None)
    assert report["workload"]["images"] == 30 and report["versions"]["torch"] == torch.__version__
    assert "NO HARDWARE RESULT" in run.output


@pytest.mark.vllm
@pytest.mark.slow
def test_the_same_code_with_the_cache_on_another_device(checkpoint):
    """A stand-in in Python, not a Trainium."""
    script = ROOT / "tests/integrations/vllm/acceptance_on_stand_in.py"
    run = subprocess.run([sys.executable, script, checkpoint], capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stderr[-5000:]
    result = json.loads(run.stdout.splitlines()[-1])
    assert {name for name, check in result["checks"].items() if check["passed"]} == set(CHECKS), result["checks"]
    assert result["checks"]["no_embedding_to_host"]["values"]["flag_bytes_in_writes"] == 2 * NUM_IMAGES
    assert {name for name, check in result["planted"].items() if not check["passed"]} == {"no_embedding_to_host"}


def test_a_check_that_raises_is_a_failed_check(deployment, monkeypatch):
    def lane():
        raise RuntimeError("NRT_EXEC_BAD_STATE")

    def tokens(*args, **kwargs):
        raise ModuleNotFoundError("No module named 'vllm'")

    monkeypatch.setattr(acceptance_run, "check_tokens", tokens)
    report = run_acceptance(
        deployment, None, lane_name="neuron", device=CPU, config="c", model="m", hardware="trn2.3xlarge", make=lane
    )
    assert not report.passed and [check.name for check in report.checks] == list(CHECKS)
    assert all("NRT_EXEC_BAD_STATE" in check.text for check in report.checks[:-1])
    assert "No module named 'vllm'" in report.checks[-1].text
    values = report.as_json()
    assert values["verdict"] == "failed" and values["note"] == "Lane neuron on trn2.3xlarge."


def test_a_report_passes_with_every_check_and_not_with_fewer():
    def report(*names, failing=()):
        checks = [Check(name, name not in failing, "", {}) for name in names]
        return Report("neuron", "compiler", "neuron", "trn2.3xlarge", "c", "m", {}, checks)

    assert report(*CHECKS).passed
    assert not report(*CHECKS[:-1]).passed
    assert not any(report(*CHECKS, failing=(name,)).passed for name in CHECKS)


# What it needs ---------------------------------------------------------------------------------------------------


@without_device
def test_without_a_device_it_says_everything_that_is_missing(tmp_path):
    run = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert run.returncode == 2 and not (tmp_path / "acceptance.json").exists()
    for words in ("/dev/neuron0", "needs torch-neuronx 2.13.3 or later", "docs/trainium.md", "--lane inductor"):
        assert words in run.stderr
    assert "Traceback" not in run.stderr


@without_device
@pytest.mark.parametrize("lane", ["neuron", "neuronx_trace", "nxd_builder"])
def test_every_lane_of_the_hardware_names_its_package(lane):
    with pytest.raises(AcceptanceError, match=f"lane '{lane}' needs"):
        require_device(lane, "neuron", None)


@without_device
def test_missing_kernels_are_among_what_is_missing():
    with pytest.raises(AcceptanceError, match=r"/dev/neuron0[\s\S]*Neuron SDK's package nki"):
        require_device("neuron", "neuron", None, "nki")


def test_a_driver_without_a_working_device_is_said():
    with pytest.raises(AcceptanceError, match="torch cannot allocate on neuron"):
        require_device("eager", "neuron", "trn2.3xlarge")
    require_device("eager", "cpu", None)


@pytest.mark.parametrize(
    ("instance", "chip"),
    [
        ("trn2.48xlarge", "trn2"),
        ("trn2u.48xlarge", "trn2"),
        ("trn3.48xlarge", "trn3"),
        ("trn1.2xlarge", None),
        (None, None),
    ],
)
def test_the_chip_is_read_from_the_instance_type(instance, chip):
    assert chip_of(instance) == chip
    assert chip is None or (ROOT / f"configs/{chip}/qwen3-vl-32b.yaml").is_file()


def test_the_instance_type_is_that_of_neuron_ls(tmp_path, monkeypatch):
    tool = tmp_path / "neuron-ls"
    tool.write_text("#!/bin/sh\nprintf 'instance-type: trn2.48xlarge\\ninstance-id: i-0\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(Path, "glob", lambda path, pattern: iter([path / "neuron0"]))
    assert instance_type() == "trn2.48xlarge"
    tool.write_text("#!/bin/sh\nexit 1\n")
    assert instance_type() == "unknown instance type"
    monkeypatch.setattr(Path, "glob", lambda path, pattern: iter([]))
    assert instance_type() is None


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"max_num_batched_tokens": 4096}, "max-num-batched-tokens is 4096. Raise it to 7680"),
        (
            {"encoder_cache_num_blocks_exact": 9, "encoder_cache_block_size": 64},
            "Raise encoder_cache_num_blocks to 121",
        ),
        ({"compiled_prefill": True}, "compiled_prefill merges inside the model"),
    ],
)
def test_a_deployment_too_small_for_the_published_workload_is_refused(checkpoint, sizes, words):
    with pytest.raises(AcceptanceError, match=words):
        require_room(deployment_of(checkpoint, **sizes))


# Compiling without a device --------------------------------------------------------------------------------------


def compile_for(chip, *arguments, tmp_path, **environment):
    """Runs the script with a Python that writes down what it was started with."""
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\nprintf "%s\\n" "$VLLM_NEURON_CPU_COMPILE" "$NEURON_PLATFORM_TARGET_OVERRIDE" "$@" >started\n'
    )
    python.chmod(0o755)
    names = ("VLLM_NEURON_CPU_MODE", "VLLM_NEURON_CPU_COMPILE", "NEURON_PLATFORM_TARGET_OVERRIDE")
    inherited = {name: value for name, value in os.environ.items() if name not in names}
    run = subprocess.run(
        [ROOT / "scripts/compile_without_device", *([chip] if chip else []), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env=inherited | {"PYTHON": str(python)} | environment,
    )
    started = tmp_path / "started"
    return run, started.read_text().splitlines() if started.exists() else None


@pytest.mark.parametrize("chip", ["trn2", "trn3"])
def test_compiling_without_a_device_sets_two_variables_and_runs_the_warm_up(tmp_path, chip):
    run, started = compile_for(chip, "--config", "a b.yaml", tmp_path=tmp_path)
    assert run.returncode == 0, run.stderr
    assert started == ["1", chip, str(ROOT / "scripts/warmup.py"), "--device", "neuron", "--config", "a b.yaml"]
    assert f"NEURON_PLATFORM_TARGET_OVERRIDE={chip}" in run.stderr


@pytest.mark.parametrize("chip", ["", "trn1", "trn4", "inf2", "Trn2", "trn2.48xlarge", "--config"])
def test_another_chip_is_refused(tmp_path, chip):
    run, started = compile_for(chip, tmp_path=tmp_path)
    assert run.returncode == 2 and started is None and f"the chip is '{chip}'; give trn2 or trn3" in run.stderr


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"VLLM_NEURON_CPU_MODE": "1"}, "excludes compiling for a device"),
        ({"NEURON_PLATFORM_TARGET_OVERRIDE": "trn3"}, "is 'trn3' and the chip is 'trn2'"),
    ],
)
def test_what_contradicts_it_is_refused(tmp_path, environment, words):
    run, started = compile_for("trn2", tmp_path=tmp_path, **environment)
    assert run.returncode == 2 and started is None and words in run.stderr


def test_it_reaches_the_warm_up(checkpoint, tmp_path, monkeypatch):
    """What it starts, in a lane that needs no device. That the started script runs, tests/test_warmup.py shows."""
    (tmp_path / "engine.yaml").write_text(
        f"model: {checkpoint}\nmax-num-batched-tokens: 128\nadditional-config: {{vllm_neuron_cache: {{}}}}\n"
    )
    arguments = ["--config", "engine.yaml", "--lane", "eager", "--device", "cpu"]
    _, (compiling, chip, script, *started) = compile_for("trn2", *arguments, tmp_path=tmp_path)
    assert script == str(ROOT / "scripts/warmup.py")
    monkeypatch.setenv("VLLM_NEURON_CPU_COMPILE", compiling)
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", chip)
    monkeypatch.chdir(tmp_path)
    run = CliRunner().invoke(app, ["warmup", *started])
    assert run.exit_code == 0 and "Lowered" in run.output, (run.output, run.exception)


# The documents ---------------------------------------------------------------------------------------------------

TRAINIUM = (ROOT / "docs/trainium.md").read_text()
FAMILIES = {
    "qwen3-vl-32b": "Qwen3-VL-32B",
    "qwen3-vl-30b-a3b": "Qwen3-VL-30B-A3B",
    "qwen2.5-vl-7b": "Qwen2.5-VL-7B",
}


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Makes folders with the configuration files of published models."""
    sys.path.insert(0, str(ROOT / "tests/planner"))
    from published_configs import write_checkpoint

    return lambda name: write_checkpoint(tmp_path_factory.mktemp("published") / "model", name)


def documented_commands():
    """Words of every command of this project in the document, without the launcher before it."""
    for block in re.findall(r"^```bash\n(.*?)^```", TRAINIUM, re.M | re.S):
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            starts = [at for at, word in enumerate(words) if word in OWN]
            if starts:
                at = starts[0]
                yield pytest.param([*OWN[words[at]], *words[at + 1 :]], id=" ".join(words[at:])[:60])


OWN = {
    "vllm-neuron-cache": [],
    "scripts/warmup.py": ["warmup"],
    "scripts/trn_acceptance": ["acceptance"],
    "scripts/compile_without_device": ["warmup", "--device", "neuron"],
}


@pytest.mark.parametrize("words", documented_commands())
def test_options_in_the_document_exist(words, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = [word for word in words if word not in ("trn2", "trn3", "--help")]
    command = typer.main.get_command(app)
    while words and hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    if words:
        command.make_context("documented", words)  # parses, and runs nothing
    assert all(Path(word).is_file() for word in words if word.startswith("configs/"))


def test_the_document_has_all_of_these_commands():
    assert len(list(documented_commands())) >= 6 and all(name in TRAINIUM for name in OWN)


def test_the_checks_of_the_report_are_documented():
    assert set(re.findall(r"^\| `(\w+)` \|", TRAINIUM, re.M)) >= set(CHECKS)
    report = Report("neuron", "compiler", "neuron", None, "c", "m", {}, [])
    assert all(f"`{key}`" in TRAINIUM for key in report.as_json())


def test_the_documented_check_for_the_device(published, tmp_path, monkeypatch):
    (line,) = [line for line in TRAINIUM.splitlines() if line.startswith("vllm-neuron-cache graphs check")]
    monkeypatch.chdir(tmp_path)
    run = CliRunner().invoke(app, line.replace("MODEL", str(published("Qwen3-VL-32B"))).split()[1:])
    assert run.exit_code == 0, (run.output, run.exception)


def test_the_documented_help():
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0 and "acceptance" in result.output


class Collected:
    """A plugin that keeps what a session collected."""

    def __init__(self):
        self.ids = []

    def pytest_collection_finish(self, session):
        self.ids = [item.nodeid for item in session.items]


def test_the_tests_of_the_device_are_there(capsys):
    files = ("tests/graphs/test_neuron_device.py", "tests/integrations/vllm/test_serving_on_device.py")
    collected = Collected()
    arguments = ["-m", "neuron", "--collect-only", "-q", "-p", "no:cacheprovider", "--rootdir", ROOT]
    pytest.main([str(word) for word in (*arguments, *(ROOT / file for file in files))], plugins=[collected])
    assert all(any(name.startswith(f"{file}::") for name in collected.ids) for file in files), capsys.readouterr()


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs").glob("trn*/*.yaml")), ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_the_files_for_the_hardware_hold_the_published_workload(path, published):
    engine = read_engine_file(path)
    shape = load_model_shape(published(FAMILIES[path.stem]), dtype=engine.dtype)
    require_room(
        plan_deployment(
            shape,
            engine.config,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            max_model_len=engine.max_model_len,
            device="neuron",
        )
    )

"""Warm-up before serving: the manifest, the engine files, and a second start that compiles nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import yaml
from typer.testing import CliRunner

from vllm_neuron_cache.cli.engine_file import read_engine_file
from vllm_neuron_cache.cli.main import app
from vllm_neuron_cache.config import NeuronCacheConfig
from vllm_neuron_cache.errors import ConfigurationError
from vllm_neuron_cache.graphs.catalog import STAMP_BUCKETS, WRITE_BUCKETS
from vllm_neuron_cache.graphs.deployment import plan_deployment
from vllm_neuron_cache.graphs.lanes import Lane, make_lane
from vllm_neuron_cache.graphs.lanes.inductor import compiler_available
from vllm_neuron_cache.planner.model import load_model_shape
from vllm_neuron_cache.source_rows import SourceRows
from vllm_neuron_cache.warmup import make_runtime, manifest, warm_up

ROOT = Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))


def small_deployment(checkpoint, **cache):
    config = NeuronCacheConfig.from_additional_config({"vllm_neuron_cache": {"encoder_cache_block_size": 64, **cache}})
    return plan_deployment(load_model_shape(checkpoint), config, max_num_batched_tokens=128)


def write_engine_file(checkpoint, folder):
    path = folder / "engine.yaml"
    path.write_text(
        f"model: {checkpoint}\nmax-num-batched-tokens: 128\nport: 8000\n"
        "additional-config:\n  vllm_neuron_cache: {encoder_cache_num_blocks_exact: 9, encoder_cache_block_size: 64}\n"
    )
    return path


@pytest.fixture
def engine_file(checkpoint, tmp_path):
    return write_engine_file(checkpoint, tmp_path)


def run_process(*words, cwd, **environment):
    """The output of a process of its own."""
    run = subprocess.run(
        [str(word) for word in words],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=cwd,
        env=os.environ | environment,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def warmed(tmp_path, *arguments):
    """What the command writes, in this process."""
    out = tmp_path / "manifest.json"
    run = CliRunner().invoke(app, ["warmup", *map(str, arguments), "--json", str(out)])
    assert run.exit_code == 0, (run.output, run.exception)
    return json.loads(out.read_text())


def documented_commands():
    document = (ROOT / "docs/graphs.md").read_text()
    return [line for line in document.splitlines() if line.startswith("vllm-neuron-cache warmup")]


# The manifest ----------------------------------------------------------------------------------------------------


def test_the_manifest_has_every_bucket_of_every_graph_once(checkpoint):
    entries = manifest(small_deployment(checkpoint))
    assert len({entry.sha256 for entry in entries}) == len(entries)
    named = [(entry.graph, entry.bucket) for entry in entries]
    assert named == [
        *(("encoder_write", bucket) for bucket in WRITE_BUCKETS),
        *(("encoder_stamp", bucket) for bucket in STAMP_BUCKETS),
        *(("merge_rows", bucket) for bucket in (64, 128)),
    ]


@torch.inference_mode()
def test_compiled_encoders_are_in_it_and_are_lowered_without_a_look_at_their_flags(checkpoint, monkeypatch):
    additional = {"vllm_neuron_cache": {"compiled_encoder": True}}
    config = NeuronCacheConfig.from_additional_config(
        additional | {"encoder_neuron_config": {"encoder_attention_block_size": 512}}
    )
    deployment = plan_deployment(load_model_shape(checkpoint), config, max_num_batched_tokens=128)
    named = [(entry.graph, entry.bucket) for entry in manifest(deployment)]
    encoder = [("encoder_qwen3_vl_256", 1), ("encoder_qwen3_vl_384", 1)]
    assert named[-5:] == encoder + [("encoder_qwen3_vl_512", bucket) for bucket in (1, 2, 4)]

    lane, flags = make_lane("eager"), object()
    lower = lane.lower

    def lowering(spec, bucket, args):
        call = lower(spec, bucket, args)
        return lambda *arguments: call(*arguments) and flags

    monkeypatch.setattr(lane, "lower", lowering)
    assert warm_up(deployment, lane, torch.device("cpu")).graphs_lowered == len(named)


def test_the_kernels_graphs_are_in_the_place_of_the_compilers(checkpoint):
    entries = manifest(small_deployment(checkpoint, kernel="nki", lane="neuron"))
    compilers = manifest(small_deployment(checkpoint))
    renamed = {"encoder_write": "encoder_write_nki", "merge_rows": "merge_rows_nki"}
    assert [(entry.graph, entry.bucket) for entry in entries] == [
        (renamed.get(entry.graph, entry.graph), entry.bucket) for entry in compilers
    ]
    kernels = {entry.sha256 for entry in entries if entry.graph in renamed.values()}
    assert len(kernels) == len(WRITE_BUCKETS) + 2
    assert not kernels & {entry.sha256 for entry in compilers}


def test_a_model_that_merges_by_itself_has_no_merge_graph_and_says_so(checkpoint):
    deployment = small_deployment(checkpoint, compiled_prefill=True)
    assert deployment.merges_in_prefill and not small_deployment(checkpoint).merges_in_prefill
    assert {entry.graph for entry in manifest(deployment)} == {"encoder_write", "encoder_stamp"}
    runtime = make_runtime(deployment, make_lane("eager"), torch.device("cpu"))
    assert isinstance(runtime.targets, SourceRows)


def test_a_lane_for_another_kernel_than_the_deployments_is_refused(checkpoint):
    deployment = small_deployment(checkpoint, kernel="nki", lane="neuron")
    with pytest.raises(ConfigurationError, match="by kernel 'nki', and the lane was made for 'compiler'"):
        make_runtime(deployment, make_lane("eager"), torch.device("cpu"))


def test_a_hash_is_that_of_the_compilation(checkpoint):
    first, second = manifest(small_deployment(checkpoint)), manifest(small_deployment(checkpoint))
    assert first == second
    larger = manifest(small_deployment(checkpoint, encoder_cache_num_blocks_exact=77))
    assert not {entry.sha256 for entry in first} & {entry.sha256 for entry in larger}


@torch.inference_mode()
def test_every_entry_is_lowered_and_no_output_is_read(checkpoint, monkeypatch):
    deployment = small_deployment(checkpoint)
    lane = make_lane("eager")
    lowered = []
    lower = lane.lower

    def recording(spec, bucket, args):
        call = lower(spec, bucket, args)
        lowered.append((spec.name, bucket))

        def unread(*arguments):
            assert call(*arguments) is None

        return unread

    monkeypatch.setattr(lane, "lower", recording)
    result = warm_up(deployment, lane, torch.device("cpu"))
    assert sorted(lowered) == sorted((entry.graph, entry.bucket) for entry in manifest(deployment))
    assert result == (len(lowered), 0)


# The command -----------------------------------------------------------------------------------------------------


class FirstStart(NamedTuple):
    folder: Path
    environment: dict[str, str]
    output: str
    manifest: dict


@pytest.fixture(scope="module")
def first_start(checkpoint, tmp_path_factory):
    """The documented command in a process of its own, with an empty cache."""
    if not compiler_available():
        pytest.skip("inductor needs a C++ compiler, and there is none")
    folder = tmp_path_factory.mktemp("first")
    write_engine_file(checkpoint, folder)
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
    (line,) = [line for line in documented_commands() if "--json manifest.json" in line]
    command, *arguments = line.split()
    output = run_process(Path(sys.executable).parent / command, *arguments, cwd=folder, **cache)
    return FirstStart(folder, cache, output, json.loads((folder / "manifest.json").read_text()))


def test_a_second_start_compiles_nothing(first_start):
    """By the script for launchers, in another process."""
    folder, cache, _, first = first_start
    words = (ROOT / "scripts/warmup.py", "--config", "engine.yaml", "--json", "second.json")
    run_process(sys.executable, *words, cwd=folder, **cache)
    second = json.loads((folder / "second.json").read_text())
    assert first["graphs_lowered"] == len(first["graphs"]) == second["graphs_from_cache"]
    assert first["graphs_from_cache"] == 0
    assert first["graphs"] == second["graphs"]


def test_a_dry_run_names_the_same_graphs_and_compiles_nothing(engine_file, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    with monkeypatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
        patch.setattr(Lane, "lower", lambda *args: pytest.fail("a graph is lowered"))
        planned = warmed(tmp_path, "--config", engine_file, "--dry-run")
    assert not (cache / "fxgraph").exists() and "graphs_lowered" not in planned
    done = warmed(tmp_path, "--config", engine_file, "--lane", "eager")
    assert done["graphs"] == planned["graphs"] and done["graphs_lowered"] == len(planned["graphs"])


@pytest.fixture
def nki_file(engine_file):
    engine_file.write_text(engine_file.read_text().replace("{enc", "{kernel: nki, lane: neuron, enc"))
    return engine_file


def test_a_dry_run_names_the_kernels_graphs_on_any_machine(nki_file, tmp_path):
    planned = warmed(tmp_path, "--config", nki_file, "--dry-run")
    assert planned["kernel"] == "nki"
    assert {row["graph"] for row in planned["graphs"]} == {"encoder_write_nki", "encoder_stamp", "merge_rows_nki"}


@pytest.mark.parametrize("mode", [["--dry-run"], []], ids=["dry", "compiling"])
def test_a_lane_of_the_cpu_in_place_of_the_files_takes_no_kernel(nki_file, mode):
    result = CliRunner().invoke(app, ["warmup", "--config", str(nki_file), "--lane", "eager", *mode])
    assert isinstance(result.exception, ConfigurationError) and "the lane is 'eager'" in str(result.exception)


def test_the_documented_commands(first_start, monkeypatch):
    assert "merge_rows" in first_start.output and first_start.manifest["lane"] == "inductor"
    (line,) = [line for line in documented_commands() if "--dry-run" in line]
    assert len(documented_commands()) == 2
    monkeypatch.chdir(first_start.folder)
    run = CliRunner().invoke(app, line.split()[1:])
    assert run.exit_code == 0 and "merge_rows" in run.output, (run.output, run.exception)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- a list", "no engine arguments"),
        ("model: [", "is not YAML"),
        ("model: x", "no vllm_neuron_cache key"),
        ("additional-config: {vllm_neuron_cache: {}}", "model is None"),
        ("model: x\nmax-num-batched-tokens: many\nadditional-config: {vllm_neuron_cache: {}}", "is 'many'; give int"),
        ("model: x\nadditional-config: {vllm_neuron_cache: {lanes: eager}}", "Did you mean 'lane'"),
        ("model: nowhere\nadditional-config: {vllm_neuron_cache: {}}", "cannot read nowhere"),
    ],
)
def test_a_file_that_says_too_little_is_an_error_with_the_remedy(tmp_path, text, words):
    path = tmp_path / "engine.yaml"
    path.write_text(text)
    result = CliRunner().invoke(app, ["warmup", "--config", str(path)])
    assert isinstance(result.exception, ConfigurationError | Exception) and words in str(result.exception)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigurationError, match="No such file"):
        read_engine_file(tmp_path / "none.yaml")


# The files in configs/ -------------------------------------------------------------------------------------------


def test_there_is_one_for_each_platform_and_family():
    names = {str(path.relative_to(ROOT / "configs")) for path in CONFIGS}
    families = ("qwen3-vl-32b", "qwen3-vl-30b-a3b", "qwen2.5-vl-7b")
    assert names >= {f"{chip}/{family}.yaml" for chip in ("trn2", "trn3") for family in families}
    assert any(name.startswith("cpu/") for name in names)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_file_is_valid_and_known_to_vllm(path):
    engine = read_engine_file(path)
    assert engine.config.lane == ("inductor" if path.parent.name == "cpu" else "neuron")
    assert engine.model.lower().removeprefix("qwen/").removesuffix("-instruct") == path.stem
    pytest.importorskip("vllm", reason="vLLM is not installed (extra 'cpu')")
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    arguments = parser.parse_args(["--config", str(path)])
    assert arguments.additional_config == yaml.safe_load(path.read_text())["additional-config"]
    assert arguments.max_num_batched_tokens == engine.max_num_batched_tokens

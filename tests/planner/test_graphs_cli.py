"""`vllm-neuron-cache graphs` as it is typed, and that it names the graphs that an engine warms up."""

import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from published_configs import write_checkpoint
from typer.testing import CliRunner

pytest.importorskip("torch", reason="torch is not installed")

import torch

from vllm_neuron_cache.cli.graphs import graphs_app
from vllm_neuron_cache.cli.main import app
from vllm_neuron_cache.config import NeuronCacheConfig
from vllm_neuron_cache.errors import ConfigurationError
from vllm_neuron_cache.graphs import catalog, deployment
from vllm_neuron_cache.graphs.check import check_spec
from vllm_neuron_cache.planner.model import load_model_shape

DOCUMENT = (Path(__file__).parents[2] / "docs/graphs.md").read_text()
COMMAND = Path(sys.executable).parent / "vllm-neuron-cache"
ON = {"vllm_neuron_cache": {}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "model", "Qwen3-VL-32B")


def run(*arguments):
    return CliRunner().invoke(graphs_app, [str(argument) for argument in arguments])


NKI = '{"vllm_neuron_cache": {"kernel": "nki", "lane": "neuron"}}'


def result_of(tmp_path, *arguments):
    result = run(*arguments, "--json", tmp_path / "out.json")
    assert result.exit_code == 0, result.output
    return json.loads((tmp_path / "out.json").read_text())


def test_the_documented_commands(model, tmp_path):
    (tmp_path / "additional.json").write_text(json.dumps(ON))
    lines = [line for block in re.findall(r"^```bash\n(.*?)^```", DOCUMENT, re.M | re.S) for line in block.splitlines()]
    lines = [line for line in lines if line.startswith("vllm-neuron-cache graphs")]
    assert {shlex.split(line)[2] for line in lines} == {"list", "check", "show"}
    for line in lines:
        _, *arguments = shlex.split(line.replace("MODEL", str(model)))
        result = subprocess.run([COMMAND, *arguments], capture_output=True, text=True, timeout=300, cwd=tmp_path)
        assert result.returncode == 0, result.stdout + result.stderr


def test_every_bucket_is_listed_with_its_bytes(model, tmp_path):
    listed = result_of(tmp_path, "list", model, "--max-num-batched-tokens", 4096)
    assert listed["cache"] == {"num_blocks": 1025, "block_size": 16, "encoder_block_size": 512}
    by_graph = {}
    for row in listed["graphs"]:
        by_graph.setdefault(row["graph"], []).append(row)
    assert [row["bucket"] for row in by_graph["merge_rows"]] == [64, 128, 256, 512, 1024, 2048, 4096]
    assert [row["bucket"] for row in by_graph["encoder_write"]] == list(catalog.WRITE_BUCKETS)
    buffer = 1025 * 16 * 20480 * 2
    write = by_graph["encoder_write"][0]
    assert write["bytes_moved"] == 64 * 20480 * 2
    assert write["argument_bytes"] == buffer + 64 * 20480 * 2 + 2 * 64 * 4
    assert by_graph["merge_rows"][-1]["argument_bytes"] == buffer + 4 * 4097 * 5120 * 2 + 2 * 4096 * 4


def test_the_configuration_decides_the_shapes(model, tmp_path):
    own = tmp_path / "own.json"
    own.write_text(json.dumps({"vllm_neuron_cache": {"encoder_cache_block_size": 64}}))
    assert result_of(tmp_path, "list", model, "--additional-config", own)["cache"]["block_size"] == 64
    assert result_of(tmp_path, "list", model, "--device", "neuron")["cache"]["block_size"] == 512
    exact = json.dumps({"vllm_neuron_cache": {"encoder_cache_num_blocks_exact": 77}})
    assert result_of(tmp_path, "list", model, "--additional-config", exact)["cache"]["num_blocks"] == 77
    in_prefill = json.dumps({"vllm_neuron_cache": {"compiled_prefill": True}})
    graphs = result_of(tmp_path, "list", model, "--additional-config", in_prefill)["graphs"]
    assert {row["graph"] for row in graphs} == {"encoder_write", "encoder_stamp"}


def test_a_slightly_larger_step_needs_the_same_write_graphs(model, tmp_path):
    graphs = [
        result_of(tmp_path, "list", model, "--max-num-batched-tokens", tokens)["graphs"] for tokens in (17_000, 17_400)
    ]
    first, second = ([row for row in rows if row["graph"] != "merge_rows"] for rows in graphs)
    assert first == second


def test_every_graph_keeps_the_rules(model, tmp_path):
    checked = result_of(tmp_path, "check", model, "--max-num-batched-tokens", 256)
    assert {row["graph"] for row in checked["graphs"]} == {"encoder_write", "encoder_stamp", "merge_rows"}
    assert not [row for row in checked["graphs"] if row["violations"]]


def test_the_kernels_graphs_are_listed_and_keep_the_rules(model, tmp_path):
    options = ("--max-num-batched-tokens", 256, "--additional-config", NKI)
    names = {"encoder_write_nki", "encoder_stamp", "merge_rows_nki"}
    assert {row["graph"] for row in result_of(tmp_path, "list", model, *options)["graphs"]} == names
    checked = result_of(tmp_path, "check", model, *options)["graphs"]
    assert {row["graph"] for row in checked} == names and not [row for row in checked if row["violations"]]
    shown = result_of(tmp_path, "show", model, "--graph", "merge_rows_nki", *options)
    assert shown["operators"]["vllm_neuron_cache.gather_merge"] == 4
    assert list(shown["aliases"]) == ["hidden", "deepstack[0]", "deepstack[1]", "deepstack[2]"]


def test_a_graph_that_breaks_a_rule_is_named_and_is_exit_status_1(model, tmp_path, monkeypatch):
    monkeypatch.setattr(
        deployment,
        "encoder_cache_specs",
        lambda *args, **sizes: tuple(
            replace(spec, mutates=()) if spec.name == "encoder_stamp" else spec
            for spec in catalog.encoder_cache_specs(*args, **sizes)
        ),
    )
    result = run("check", model, "--max-num-batched-tokens", 64, "--json", tmp_path / "out.json")
    assert result.exit_code == 1
    assert "alias_map" in result.output and "encoder_stamp" in result.output
    rows = json.loads((tmp_path / "out.json").read_text())["graphs"]
    assert {row["graph"] for row in rows if row["violations"]} == {"encoder_stamp"}


def test_one_graph_is_shown_with_its_arguments_aliases_and_operators(model, tmp_path):
    shown = result_of(tmp_path, "show", model, "--graph", "merge_rows", "--bucket", 128)
    assert shown["aliases"] == {"hidden": 0, "deepstack[0]": 1, "deepstack[1]": 2, "deepstack[2]": 3}
    assert shown["operators"]["aten.index_put.default"] == 4
    arguments = {argument["name"]: argument for argument in shown["arguments"]}
    assert arguments["src_rows"] == {"name": "src_rows", "dtype": "int32", "shape": [128], "bytes": 512}
    assert arguments["buffer"]["shape"] == [1025, 16, 20480]
    assert result_of(tmp_path, "show", model, "--graph", "encoder_stamp")["bucket"] == catalog.STAMP_BUCKETS[-1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("list", "nowhere"), "cannot read nowhere"),
        (("list", "MODEL", "--additional-config", "nowhere.json"), "neither JSON nor a readable file"),
        (("list", "MODEL", "--additional-config", "{"), "is not JSON"),
        (("list", "MODEL", "--additional-config", '{"vllm_neuron_cache": {"lanes": 1}}'), "Did you mean 'lane'"),
        (("list", "MODEL", "--device", "gpu"), "give cpu or neuron"),
        (("show", "MODEL", "--graph", "merge"), "encoder_write, encoder_stamp, merge_rows"),
        (("show", "MODEL", "--graph", "merge_rows", "--bucket", "65"), "64, 128"),
    ],
)
def test_what_cannot_be_answered_is_an_error_with_the_remedy(model, arguments, words):
    result = CliRunner().invoke(app, ["graphs", *(str(model) if a == "MODEL" else a for a in arguments)])
    assert isinstance(result.exception, Exception) and words in str(result.exception), result.output


@pytest.mark.vllm
def test_they_are_the_graphs_that_an_engine_warms_up(checkpoint):
    pytest.importorskip("vllm", reason="vLLM is not installed (extra 'cpu')")
    from vllm.engine.arg_utils import EngineArgs

    from vllm_neuron_cache.integrations.vllm.geometry import resolve_geometry

    arguments = EngineArgs(model=str(checkpoint), max_num_batched_tokens=3000, additional_config=ON)
    planned = deployment.plan_deployment(
        load_model_shape(checkpoint),
        NeuronCacheConfig.from_additional_config(ON),
        max_num_batched_tokens=3000,
    )
    assert planned.geometry == resolve_geometry(arguments.create_engine_config())


def test_an_engine_on_neuron_that_the_merger_does_not_divide_is_refused(model):
    config = NeuronCacheConfig.from_additional_config(
        ON | {"encoder_neuron_config": {"encoder_attention_block_size": 3}}
    )
    with pytest.raises(ConfigurationError, match="multiple of 4"):
        deployment.plan_deployment(load_model_shape(model), config, max_num_batched_tokens=64, device="neuron")


# Compiled encoders -----------------------------------------------------------------------------------------------

ENCODER = {
    "vllm_neuron_cache": {"compiled_encoder": True},
    "encoder_neuron_config": {"encoder_attention_block_size": 256},
}


@pytest.mark.parametrize(
    ("name", "graphs"),
    [
        ("Qwen3-VL-32B", {"encoder_qwen3_vl_256": [1, 2, 4]}),
        ("Qwen3-VL-30B-A3B", {"encoder_qwen3_vl_256": [1, 2, 4]}),
        ("Qwen2.5-VL-7B", {"encoder_qwen2_5_vl_256": [1, 2, 4]}),
        ("Qwen2.5-Omni-7B", {"encoder_qwen2_5_vl_256": [1, 2, 4], "encoder_qwen_omni_audio_100": [1, 2, 4, 8, 16]}),
    ],
)
def test_encoders_of_published_models_are_listed(tmp_path, name, graphs):
    model = write_checkpoint(tmp_path / "model", name)
    listed = result_of(tmp_path, "list", model, "--additional-config", json.dumps(ENCODER))
    found = {}
    for row in listed["graphs"]:
        if row["graph"] not in ("encoder_write", "encoder_stamp", "merge_rows"):
            assert row["mutates"] == ["buffer"]
            found.setdefault(row["graph"], []).append(row["bucket"])
    assert found == graphs


def test_a_published_encoder_keeps_the_rules(model):
    config = NeuronCacheConfig.from_additional_config(ENCODER)
    planned = deployment.plan_deployment(load_model_shape(model), config, max_num_batched_tokens=4096)
    (spec,) = (spec for spec in planned.specs if spec.name.startswith("encoder_qwen3_vl"))
    report = check_spec(spec, 1)
    assert list(report.aliases) == ["buffer"] and planned.buffer.dtype is torch.bfloat16


@pytest.mark.parametrize("name", ["Qwen2-VL-7B", "Qwen3-Omni-30B-A3B"])
def test_a_model_without_a_compiled_encoder_is_refused(tmp_path, name):
    model = write_checkpoint(tmp_path / "model", name)
    with pytest.raises(ConfigurationError, match="has no encoder that can be compiled"):
        run_raising("list", model, "--additional-config", json.dumps(ENCODER))


def test_a_configuration_without_a_size_is_refused(tmp_path):
    model = write_checkpoint(tmp_path / "model", "Qwen3-VL-32B")
    config = json.loads((model / "config.json").read_text())
    del config["vision_config"]["num_heads"]
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigurationError, match="has no 'num_heads'"):
        run_raising("list", model, "--additional-config", json.dumps(ENCODER))


def run_raising(*arguments):
    result = run(*arguments)
    raise result.exception

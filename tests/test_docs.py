"""Documentation and code say the same: commands, keys, defaults, links."""

import ast
import dataclasses
import json
import re
from pathlib import Path

import pytest

from vllm_neuron_cache.config import EncoderNeuronConfig, NeuronCacheConfig, StageCacheConfig

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

# Every command of the documents, and the test that runs it.
RUN_BY = {
    "./scripts/quickstart": "tests/test_cli.py::test_demo",
    "./scripts/test": "tests/test_scripts.py::test_the_suite_runs_under_its_own_script",
    "python -m vllm.entrypoints.openai.api_server --model MODEL --additional-config '{\"vllm_neuron_cache\": {}}'": (
        "tests/integrations/vllm/test_server.py::test_images_over_http_give_the_tokens_of_stock"
    ),
    "vllm-neuron-cache demo --json demo.json --plot demo.png": "tests/test_cli.py::test_demo",
    "vllm-neuron-cache bench graphs --json graphs.json": "tests/test_cli.py::test_bench_graphs",
    "vllm-neuron-cache bench hits --json hits.json": "tests/test_cli.py::test_bench_hits",
    "vllm-neuron-cache bench pool --json pool.json": "tests/test_cli.py::test_bench_pool",
    "vllm-neuron-cache bench stage-cache --json stage.json": (
        "tests/stage_cache/test_stage_bench.py::test_the_command_writes_the_measures"
    ),
    "./scripts/omni_env python -m vllm_neuron_cache.cli bench stage-cache --json stage.json": (
        "tests/test_scripts.py::test_the_environment_of_vllm_omni_runs_a_command"
    ),
    "./scripts/xla_env": "tests/test_scripts.py::test_the_whole_suite_runs_the_tests_of_lane_xla",
    "./scripts/torch_xla_env": "tests/test_scripts.py::test_the_optional_environment_runs_its_tests",
    "vllm-neuron-cache graphs list MODEL --additional-config additional.json": (
        "tests/planner/test_graphs_cli.py::test_the_documented_commands"
    ),
    "vllm-neuron-cache graphs list MODEL --additional-config "
    """'{"vllm_neuron_cache": {"kernel": "nki", "lane": "neuron"}}'""": (
        "tests/planner/test_graphs_cli.py::test_the_documented_commands"
    ),
    "vllm-neuron-cache graphs check MODEL --max-num-batched-tokens 4096 --json graphs.json": (
        "tests/planner/test_graphs_cli.py::test_the_documented_commands"
    ),
    "vllm-neuron-cache graphs show MODEL --graph merge_rows --bucket 512": (
        "tests/planner/test_graphs_cli.py::test_the_documented_commands"
    ),
    "vllm-neuron-cache warmup --config engine.yaml --dry-run": "tests/test_warmup.py::test_the_documented_commands",
    "vllm-neuron-cache warmup --config engine.yaml --json manifest.json": (
        "tests/test_warmup.py::test_the_documented_commands"
    ),
    "scripts/trn_acceptance --config engine.yaml --lane inductor --device cpu --json acceptance.json": (
        "tests/test_acceptance.py::test_the_documented_run_on_a_cpu"
    ),
    "vllm-neuron-cache graphs check MODEL --device neuron --max-num-batched-tokens 8192 --json graphs.json": (
        "tests/test_acceptance.py::test_the_documented_check_for_the_device"
    ),
    "vllm-neuron-cache --help": "tests/test_acceptance.py::test_the_documented_help",
    "python -m pytest -m neuron": "tests/test_acceptance.py::test_the_tests_of_the_device_are_there",
    "vllm-neuron-cache plan MODEL --sizes 512x512,1920x1080 --json plan.json --plot plan.png": (
        "tests/planner/test_planner_cli.py::test_the_documented_commands"
    ),
    "vllm-neuron-cache plan MODEL --hbm-gib 4 --sizes-file sizes.txt --reuse 0.6 --encode-ms-per-1k-tokens 40": (
        "tests/planner/test_planner_cli.py::test_the_documented_commands"
    ),
}

# Commands that no test can run, by the document that has them, and why. Options of this project's own are parsed
# (tests/test_acceptance.py).
NOT_RUN = {
    "trainium.md": "they need a machine with a Trainium, its driver, AWS's packages or a network",
}


def code_blocks(language: str, documents: list[Path] = DOCUMENTS) -> list[str]:
    return [
        block
        for document in documents
        for block in re.findall(rf"^```{language}\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)
    ]


def commands(documents: list[Path] = DOCUMENTS) -> set[str]:
    lines = [line.split("    #")[0].strip() for block in code_blocks("bash", documents) for line in block.splitlines()]
    return {line for line in lines if line and not line.startswith("#")}


def test_every_command_is_run_by_a_test():
    not_run = commands([document for document in DOCUMENTS if document.name in NOT_RUN]) - set(RUN_BY)
    assert commands() - not_run == set(RUN_BY)
    assert all("Unproved" in (ROOT / "docs" / name).read_text() for name in NOT_RUN)


@pytest.mark.parametrize("test", sorted(set(RUN_BY.values())))
def test_those_tests_exist(test):
    path, name = test.split("::")
    functions = {
        node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, ast.FunctionDef)
    }
    assert name in functions


def test_the_server_test_uses_the_documented_configuration():
    source = (ROOT / "tests/integrations/vllm/test_server.py").read_text()
    assert """'{"vllm_neuron_cache": {}}'""" in source


def test_the_example_of_the_stage_cache_runs():
    import torch

    from vllm_neuron_cache.bench.stage_driver import HIDDEN, config_for
    from vllm_neuron_cache.simulation.stage_schedule import ScheduledBatch, ScheduleShape, StageSchedule, row_values
    from vllm_neuron_cache.stage_cache import FullAttentionGroupView

    (example,) = code_blocks("python", [ROOT / "docs/stage_cache.md"])
    shape = ScheduleShape(num_requests=2, prompt_tokens=20, shared_tokens=16, decode_tokens=1, families=1)
    batch, step = ScheduledBatch(shape), next(StageSchedule(shape).steps())
    batch.load(step)
    hidden = torch.from_numpy(row_values(step.contents, HIDDEN))
    names = {
        "config": config_for(shape),
        "view": FullAttentionGroupView(batch, shape.block_size),
        "model": object(),
        "scheduler_output": step.scheduler_output,
        "hidden": hidden,
        "mm_outputs": {},
        "n": len(hidden),
        "n_padded": len(hidden),
        "req_ids": step.req_ids,
    }
    exec(example, names)
    for req_id, contents in step.expected.items():
        assert len(contents) >= 20  # the second has a hit on what the first computes
        assert names["outputs"].hidden_states[req_id].tolist() == row_values(contents, HIDDEN).tolist()


@pytest.mark.vllm
def test_the_python_example_runs(checkpoint, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # starts in seconds
    (example,) = code_blocks("python", [ROOT / "README.md"])
    names: dict = {"MODEL": str(checkpoint)}
    exec(
        example.replace(
            "max_model_len=4096",
            "max_model_len=4096, max_num_seqs=8, enforce_eager=True,"
            " kv_cache_memory_bytes=1 << 26, limit_mm_per_prompt={'image': 1}",
        ),
        names,
    )
    assert names["llm"].collective_rpc("encoder_cache_stats")[0]["graphs_compiled"] > 0
    names["llm"].llm_engine.engine_core.shutdown()


def test_json_examples_are_valid_configurations():
    for block in code_blocks("json"):
        NeuronCacheConfig.from_additional_config(json.loads(block))


def test_every_key_and_default_is_documented_and_no_other():
    text = (ROOT / "docs/configuration.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", text, re.MULTILINE))
    keys = {
        field.name: json.dumps(field.default)
        for config in (NeuronCacheConfig, EncoderNeuronConfig, StageCacheConfig)
        for field in dataclasses.fields(config)
        if field.name != "encoder"
    }
    assert rows == keys


def test_links_lead_somewhere():
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_names_of_classes_in_the_documents_exist():
    """Names in code style that look like classes of this package are classes of this package, or of vLLM."""
    sources = "".join(path.read_text() for path in (ROOT / "vllm_neuron_cache").rglob("*.py"))
    for document in DOCUMENTS:
        for name in re.findall(r"`([A-Z][a-z]+[A-Z]\w+)`", document.read_text()):
            assert re.search(rf"\b{name}\b", sources), f"{document.name} names {name}"


def test_the_fault_tables_are_those_that_the_tests_check():
    import sys

    sys.path.insert(0, str(ROOT / "tests/integrations/vllm"))
    from matrix import expected_tables

    text = (ROOT / "docs/faults.md").read_text()
    for table in expected_tables():
        assert table in text

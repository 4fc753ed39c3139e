"""A hit step on a device: row lists go there, nothing comes back, and nothing but graphs runs.

The device is a stand-in (see `neuron_device.py`), everything else is the real engine and its runner. What is counted
lies between the scheduler's output and the model's forward, with the merged rows in place.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm

TEXT_EMBEDDINGS = ["aten.copy_.default", "vllm/v1/worker/gpu_model_runner.py"]
"""vLLM's own copy of the text embeddings into its input buffer, on every platform."""

INDEX_BYTES = 4


@pytest.fixture(scope="module")
def result(checkpoint):
    script = Path(__file__).with_name("neuron_step.py")
    run = subprocess.run([sys.executable, script, checkpoint], capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-5000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("request_name", ["one", "several", "a chunk that ends within"])
def test_a_hit_step_sends_ids_and_positions_and_reads_nothing(result, request_name):
    request = result["requests"][request_name]
    assert request["tokens"] == request["expected"]
    merging = [step for step in request["steps"] if step["launches"]]
    assert len(merging) == {"one": 1, "several": 2, "a chunk that ends within": 2}[request_name]
    for step in request["steps"]:
        assert step["to_host"] == []
        assert step["eager"] == [TEXT_EMBEDDINGS]
    for step in merging:
        assert step["launches"] == ["merge_rows"]
        (dtype, num_bytes), second = step["to_device"]  # source and destination rows
        assert [dtype, num_bytes] == second and dtype == "int32"
        assert num_bytes // INDEX_BYTES in (64, 128, 256, 512)  # a bucket, whatever the width of a row
    for step in request["steps"]:
        assert step in merging or step["to_device"] == []  # decode


def test_nothing_was_encoded_or_compiled_meanwhile(result):
    assert (result["encoder_runs"], result["recompiles"]) == (0, 0)


@pytest.mark.parametrize("read", ["item", "tolist", "cpu", "to", "numpy", "bool", "int", "copy_", "equal", "nonzero"])
def test_a_read_of_device_memory_raises(result, read):
    assert "HostReadError" in result["refused_reads"][read] or "not supported" in result["refused_reads"][read]


def test_a_runner_that_reads_is_caught(result):
    assert result["controls"]["read"].startswith("HostReadError")


def test_a_runner_that_sends_rows_is_caught(result):
    assert ["float32", 512] in result["controls"]["rows sent"]["to_device"]


def test_operators_outside_of_a_graph_are_caught(result):
    control = result["controls"]["eager lane"]
    ours = [operator for operator, file in control["eager"] if file == "vllm_neuron_cache/graphs/merge.py"]
    assert ours == ["aten.index_select.default"] + 4 * ["aten.index_put_.default"] and control["launches"] == []

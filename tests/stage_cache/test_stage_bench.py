"""The stage cache's benchmark: what it measures, and that it notices wrong rows."""

import dataclasses
import json

import pytest
from typer.testing import CliRunner

from vllm_neuron_cache.bench import stage_cache as bench
from vllm_neuron_cache.bench.stage_cache import StageBenchShape, bench_stage_cache
from vllm_neuron_cache.bench.stage_contenders import StraightLine
from vllm_neuron_cache.cli.main import app
from vllm_neuron_cache.errors import WrongRowsError
from vllm_neuron_cache.integrations.vllm_omni.peer_cache import peer_is_there
from vllm_neuron_cache.simulation.stage_schedule import ScheduleShape, StageSchedule

SMALL = StageBenchShape(
    hidden_size=64,
    decode_requests=(4,),
    decode_steps=10,
    workload=ScheduleShape(
        num_requests=8,
        prompt_tokens=64,
        shared_tokens=32,
        decode_tokens=4,
        num_blocks=64,
        max_running=4,
        step_tokens=96,
    ),
    hit_requests=2,
    hit_tokens=64,
    decoders=4,
    scatter_rows=64,
    scatter_blocks=32,
    random_schedules=20,
)


def test_every_measure_is_there():
    steps = []
    result = bench_stage_cache(SMALL, rounds=1, step=steps.append)
    assert result["decode_ms"]["4"].keys() == {"ours", "peer", "reference"}
    assert all(result[name] > 0 for name in ("workload_ratio_reference", "cliff_ratio", "scatter_speed_of_memcpy"))
    assert (result["workload_ratio_peer"] is None) is not peer_is_there()
    assert result["random_schedules"]["count"] == 20 and result["random_schedules"]["rows_from_cache"] > 0
    assert len(steps) == 5


def test_the_command_writes_the_measures(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "StageBenchShape", lambda: SMALL)
    file = tmp_path / "stage.json"
    result = CliRunner().invoke(app, ["bench", "stage-cache", "--rounds", "1", "--json", str(file)])
    assert result.exit_code == 0, result.output
    assert "cliff_ratio" in json.loads(file.read_text())


def test_a_contender_that_hands_on_wrong_rows_is_found(monkeypatch):
    write = StraightLine.save

    def shifted(self, hidden, rows, num_tokens):
        return write(self, hidden, rows.roll(1, dims=0), num_tokens)

    monkeypatch.setattr(StraightLine, "save", shifted)
    with pytest.raises(WrongRowsError, match="hands request"):
        bench_stage_cache(SMALL, rounds=1, step=lambda text: None)


def test_the_workload_of_the_documented_figures():
    shape = StageBenchShape().workload
    assert (shape.num_requests, shape.prompt_tokens, shape.shared_tokens) == (64, 1024, 512)
    assert (shape.decode_tokens, shape.max_running) == (64, 32)
    steps = list(StageSchedule(dataclasses.replace(shape)).steps())
    hit = sum(stop - first for step in steps for first, stop in step.hit_positions.values())
    assert hit == 60 * 512  # all but the first of each family


@pytest.mark.omni
@pytest.mark.slow
def test_a_fraction_of_the_peers_time():
    if not peer_is_there():
        pytest.skip("vLLM-Omni is not installed; scripts/omni_env runs this")
    shape = StageBenchShape(decode_steps=24, scatter_blocks=256, random_schedules=1)
    result = bench_stage_cache(shape, rounds=2, step=lambda text: None)
    for figures in result["decode_ms"].values():
        assert figures["ours"] <= figures["peer"] / 10
    assert result["workload_ratio_peer"] <= 1 / 3

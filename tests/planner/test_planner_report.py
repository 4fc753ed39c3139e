"""A plan as JSON, tables, options and a picture."""

import io
import json
import shlex
import sys

import pytest
from published_configs import write_checkpoint
from rich.console import Console

from vllm_neuron_cache.config import NeuronCacheConfig
from vllm_neuron_cache.errors import PlannerError
from vllm_neuron_cache.planner.items import parse_sizes
from vllm_neuron_cache.planner.model import load_model_shape
from vllm_neuron_cache.planner.plan import make_plan
from vllm_neuron_cache.planner.plot import check_format, plot
from vllm_neuron_cache.planner.report import as_json, show, vllm_flags
from vllm_neuron_cache.planner.values import PlanRequest, SimulatedHits


@pytest.fixture(scope="module")
def shape(tmp_path_factory):
    return load_model_shape(write_checkpoint(tmp_path_factory.mktemp("model"), "Qwen3-Omni-30B-A3B"))


def plan_of(shape, simulate=None, **request):
    return make_plan(shape, PlanRequest(sizes=parse_sizes("512x512,4096x4096,30s"), **request), simulate)


def simulate(geometry, item_tokens, reuse):
    return SimulatedHits(hit_rate=0.625, encoder_tokens_saved_fraction=0.5)


def shown(plan):
    console = Console(file=io.StringIO(), width=160)
    show(plan, console)
    return console.file.getvalue()


def test_json_holds_the_plan_in_plain_values(shape):
    plan = plan_of(shape, simulate, hbm_gib=0.1, reuse=0.6, encode_ms_per_1k_tokens=40, kv_blocks=15092)
    values = as_json(plan)
    assert json.loads(json.dumps(values)) == values
    assert values["model"]["fat_dim"] == 8192 and values["model"]["image_pixels"]["max_pixels"] == 12845056
    assert values["cache"]["bytes_per_rank"] == plan.buffer.bytes_per_rank == 409 * 16 * 8192 * 2
    assert values["cache"]["largest_item_tokens"]["audio"] == 750
    assert [size["refused"] for size in values["sizes"]] == [False, True, False]
    assert [size["modality"] for size in values["sizes"]] == ["image", "image", "audio"]
    assert values["load"]["hit_rate"] == 0.625
    assert values["load"]["saved_seconds_per_1000_requests"] == plan.saved_seconds_per_1000
    assert values["stage_cache"][0]["bytes"] == 15092 * 16 * 2048 * 2
    assert len(values["warnings"]) == 3
    NeuronCacheConfig.from_additional_config(values["additional_config"])


def test_what_was_not_asked_is_null(shape):
    values = as_json(plan_of(shape))
    load = {key: value for key, value in values["load"].items() if key != "mean_item_tokens"}
    assert load and set(load.values()) == {None}
    assert values["stage_cache"][0]["bytes"] is None


def test_options_survive_a_shell(shape):
    plan = plan_of(shape, hbm_gib=1, tensor_parallel_size=4, max_model_len=8192)
    words = shlex.split(vllm_flags(plan))
    expected = "--dtype bfloat16 --max-num-batched-tokens 2048 --max-model-len 8192 --tensor-parallel-size 4"
    assert " ".join(words[:-2]) == expected
    assert words[-2] == "--additional-config" and json.loads(words[-1]) == plan.additional_config


def test_tables_say_it_all(shape):
    plan = plan_of(shape, simulate, hbm_gib=0.1, reuse=0.6, encode_ms_per_1k_tokens=40, kv_blocks=15092)
    text = shown(plan)
    for words in ("409 x 16 x 8192", "62.5%", "refused", "30s", "0.921", "warning: Refused on arrival: 4096x4096."):
        assert words in text, words
    assert vllm_flags(plan) in text.splitlines(), "the options are one line"


def test_figures_without_a_source_are_left_out(shape):
    text = shown(plan_of(shape))
    assert "hit rate" not in text and "saved" not in text and "encoding" not in text
    assert "KiB per KV block" in text


def test_notes_are_printed(tmp_path):
    folder = write_checkpoint(tmp_path, "Qwen3-VL-32B")
    (folder / "preprocessor_config.json").unlink()
    text = shown(make_plan(load_model_shape(folder), PlanRequest(sizes=parse_sizes("512x512"))))
    assert "note: There is no preprocessor_config.json" in text and "stage cache" not in text


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_a_picture(shape, tmp_path, ending):
    pytest.importorskip("matplotlib")
    file = tmp_path / f"plan.{ending}"
    check_format(file)
    plot(plan_of(shape, hbm_gib=0.1), file)
    assert file.read_bytes().startswith({"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[ending])


def test_pictures_that_cannot_be_drawn(tmp_path, monkeypatch):
    with pytest.raises(PlannerError, match=r"one of the endings \.png, \.svg, \.pdf"):
        check_format(tmp_path / "plan.bmp")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PlannerError, match="matplotlib is not installed"):
        check_format(tmp_path / "plan.png")

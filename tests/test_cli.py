"""The command line on real engines: the demo, the benchmarks, and mistakes."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from vllm_neuron_cache.config import LANES

pytestmark = pytest.mark.vllm

pytest.importorskip("vllm", reason="vLLM is not installed (extra 'cpu')")

ROOT = Path(__file__).parents[1]
COMMAND = Path(sys.executable).parent / "vllm-neuron-cache"


def in_script_environment() -> bool:
    return Path(sys.prefix).resolve() == (ROOT / ".venv").resolve()


def run(*arguments: str, timeout: int = 600) -> subprocess.CompletedProcess:
    return subprocess.run([COMMAND, *arguments], capture_output=True, text=True, timeout=timeout)


def test_demo(tmp_path):
    """The demo with both files; in the environment that the scripts made, through the quickstart.

    That is then a second quickstart, which installs nothing.
    """
    stamps = sorted((ROOT / ".venv").glob(".*-complete")) if in_script_environment() else []
    before = [stamp.stat().st_mtime_ns for stamp in stamps]
    command = [ROOT / "scripts/quickstart"] if stamps else [COMMAND, "demo"]
    files = ["--json", tmp_path / "demo.json", "--plot", tmp_path / "demo.png"]
    begin = time.monotonic()
    result = subprocess.run([*command, *files], capture_output=True, text=True, timeout=600)
    print(f"{command[0]} took {time.monotonic() - begin:.0f} s")
    assert result.returncode == 0, result.stdout + result.stderr
    assert [stamp.stat().st_mtime_ns for stamp in stamps] == before
    assert "[1/" not in result.stdout, "something was installed"
    assert "identical" in result.stdout and "predicted" in result.stdout
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    values = json.loads((tmp_path / "demo.json").read_text())
    assert values["tokens_identical"] is True
    assert values["requests"] == 24
    assert values["encoder_runs"]["blocks"] == values["encoder_runs"]["expected"] == 9
    assert values["encoder_runs"]["stock"] >= 9
    assert values["hits"] == 20
    assert values["processor_cache_hits"] > 0
    assert set(values["ttft_ms"]) == {"stock_miss", "stock_hit", "blocks_miss", "blocks_hit"}
    assert values["ttft_ms"]["blocks_hit"] < values["ttft_ms"]["blocks_miss"]
    blocks = values["blocks"]
    assert blocks["bytes"] == blocks["num_blocks"] * blocks["block_size"] * blocks["fat_dim"] * 4
    assert 0 < blocks["peak_used"] < blocks["num_blocks"]
    assert 0 < blocks["padding_waste"] < 1
    assert values["graphs"]["compiled"] > 0 and values["graphs"]["recompiles_after_warmup"] == 0


def test_demo_exits_with_one_if_a_token_differs(tmp_path, monkeypatch):
    """The demo's own command line in this process, in which the cache loses its deepstack rows."""
    from vllm_neuron_cache.cli import demo
    from vllm_neuron_cache.cli.main import main
    from vllm_neuron_cache.runtime import EncoderCacheRuntime

    write, requests = EncoderCacheRuntime.write, demo.demo_requests()[:3]

    def damaged(runtime, key, output):
        output = output.clone()
        output[:, 128:] = 0
        write(runtime, key, output)

    monkeypatch.setattr(EncoderCacheRuntime, "write", damaged)
    monkeypatch.setattr(demo, "demo_requests", lambda: requests)
    monkeypatch.setattr(sys, "argv", ["vllm-neuron-cache", "demo", "--json", str(tmp_path / "demo.json")])
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert json.loads((tmp_path / "demo.json").read_text())["tokens_identical"] is False


def test_bench_hits(tmp_path):
    result = run("bench", "hits", "--pairs", "4", "--json", str(tmp_path / "hits.json"))
    assert result.returncode == 0, result.stdout + result.stderr
    values = json.loads((tmp_path / "hits.json").read_text())
    assert values["pairs"] == 4
    assert 0 < values["ttft_ratio_hit"] <= values["ttft_ratio_hit_upper"]
    assert 0 < values["hook_us"] < values["hook_us_miss"]
    assert 0 < values["hit_over_miss"] < 1
    assert values["recompiles_after_warmup"] == 0


def test_bench_pool(tmp_path):
    result = run("bench", "pool", "--rounds", "1", "--requests", "40", "--json", str(tmp_path / "pool.json"))
    assert result.returncode == 0, result.stderr
    figures = json.loads((tmp_path / "pool.json").read_text())
    assert figures["stalled_steps"] == figures["failed_requests"] == 0 < figures["stock"]["overflows"]
    items = figures["resident_items"]
    assert items["b64"] >= 3.9 * items["coarse"] and items["b16"] >= 6.2 * items["coarse"]
    assert figures["hit_rate"]["fine_quarter"] >= figures["hit_rate"]["coarse_full"] > 0
    assert figures["ops_ratio_stock"] > 0 and figures["growth"] > 0


@pytest.mark.skipif(
    psutil.virtual_memory().available < 9 << 30, reason="bench graphs allocates 6 GB, and less than 9 GB are free"
)
def test_bench_graphs(tmp_path):
    result = run("bench", "graphs", "--rounds", "1", "--json", str(tmp_path / "graphs.json"))
    assert result.returncode == 0, result.stdout + result.stderr
    values = json.loads((tmp_path / "graphs.json").read_text())
    for name in ("write", "merge_fat", "merge_split"):
        assert values[name]["ratio_memcpy"] > 0
    # Not a bound, which belongs to a quiet machine: the usual form is slower by an order of magnitude.
    assert values["merge_usual"]["inductor"] > 3 * values["merge_split"]["ratio_memcpy"]
    assert values["recompiles_after_warmup"] == 0
    encoder = values["encoder"]
    assert encoder["ratio_stock"] > 0 and encoder["mixed"]["padding_ratio"] > 1 > encoder["write_share"] > 0
    assert set(values["lanes"]) == set(LANES)
    assert all(lane["equals_eager"] for lane in values["lanes"].values() if "missing" not in lane)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["demo", "--json", "no/such/folder/demo.json"], 2, "cannot write no/such/folder/demo.json"),
        (["bench", "hits", "--json", "/"], 2, "cannot write /"),
        (["bench", "pool", "--json", "/"], 2, "cannot write /"),
        (["bench", "hits", "--pairs", "1"], 2, "--pairs"),
        (["demo", "--no-such-option"], 2, "No such option"),
        (["nonsense"], 2, "nonsense"),
    ],
)
def test_mistakes_are_one_message_and_a_status(arguments, status, message):
    result = run(*arguments)
    assert result.returncode == status
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_folder_that_is_no_checkpoint_is_not_overwritten(tmp_path):
    precious = tmp_path / "precious.txt"
    precious.write_text("keep me")
    result = run("demo", "--checkpoint", str(tmp_path))
    assert result.returncode == 2
    assert "is not version" in result.stderr
    assert os.listdir(tmp_path) == ["precious.txt"]


def test_help_lists_the_commands():
    result = run("--help")
    assert result.returncode == 0
    assert "demo" in result.stdout and "bench" in result.stdout

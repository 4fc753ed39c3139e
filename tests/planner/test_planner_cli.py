"""`vllm-neuron-cache plan` as it is typed, and what its documentation says."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from published_configs import CHECKPOINTS, write_checkpoint

from vllm_neuron_cache.cli import main
from vllm_neuron_cache.config import NeuronCacheConfig
from vllm_neuron_cache.planner.items import parse_sizes
from vllm_neuron_cache.planner.model import load_model_shape
from vllm_neuron_cache.planner.plan import make_plan
from vllm_neuron_cache.planner.values import GIB, PlanRequest

DOCUMENT = (Path(__file__).parents[2] / "docs/planner.md").read_text()
COMMAND = Path(sys.executable).parent / "vllm-neuron-cache"


@pytest.fixture
def model(tmp_path):
    return write_checkpoint(tmp_path / "model", "Qwen3-VL-32B")


def run(*arguments, cwd=None):
    return subprocess.run([COMMAND, "plan", *map(str, arguments)], capture_output=True, text=True, timeout=300, cwd=cwd)


def code_block(language):
    return re.search(rf"^```{language}\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL).group(1)


def test_the_documented_commands(model, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "sizes.txt").write_text(code_block("text"))
    for line in code_block("bash").splitlines():
        command, name, *arguments = shlex.split(line.replace("MODEL", str(model)))
        assert (command, name) == ("vllm-neuron-cache", "plan")
        result = run(*arguments, cwd=tmp_path)
        assert result.returncode == 0, result.stdout + result.stderr
        assert "Encoder cache for Qwen3-VL" in result.stdout and "--additional-config" in result.stdout
    assert "640x480x16" in result.stdout
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    values = json.loads((tmp_path / "plan.json").read_text())
    assert [size["tokens"] for size in values["sizes"]] == [256, 2040]
    NeuronCacheConfig.from_additional_config(values["additional_config"])
    documented = re.search(r"^## JSON\n(.*)", DOCUMENT, re.MULTILINE | re.DOTALL).group(1)
    assert {key for key in values if f"`{key}`" not in documented} == set()
    assert {key for key in values["cache"] | values["load"] if f"`{key}`" not in documented} == set()


def test_neither_torch_nor_vllm_is_loaded(model):
    program = (
        "import sys\n"
        f"sys.argv = ['vllm-neuron-cache', 'plan', {str(model)!r}]\n"
        "from vllm_neuron_cache.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as done:\n    print(done.code, {'torch', 'vllm'} & set(sys.modules))\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert result.stdout.endswith("0 set()\n"), result.stdout + result.stderr


def test_every_option_is_documented(monkeypatch):
    # Wide, so that no name is cut.
    monkeypatch.setenv("COLUMNS", "200")
    options = set(re.findall(r"--[a-z0-9-]+", run("--help").stdout)) - {"--help"}
    assert options == set(re.findall(r"--[a-z0-9-]+", "".join(re.findall(r"^\| `--.*?\|", DOCUMENT, re.MULTILINE))))


def test_the_documented_table_is_what_the_planner_says(tmp_path):
    for name in CHECKPOINTS:
        shape = load_model_shape(write_checkpoint(tmp_path / name, name))
        plan = make_plan(shape, PlanRequest(sizes=parse_sizes("512x512"), max_model_len=32768))
        row = (
            name,
            shape.fat_dim,
            plan.sizes[0].tokens,
            max(plan.largest_items.values()),
            f"{plan.geometry.num_blocks} x {plan.geometry.block_size}",
            f"{plan.buffer.bytes_per_rank / GIB:.2f}",
        )
        assert f"| {' | '.join(map(str, row))} |" in DOCUMENT


def test_hits_and_the_time_saved_come_from_the_simulator(model, tmp_path, monkeypatch, capsys):
    pytest.importorskip("vllm", reason="vLLM is not installed (extra 'cpu')")
    file = tmp_path / "plan.json"
    arguments = ["--sizes", "512x512", "--reuse", "0.5", "--encode-ms-per-1k-tokens", "40", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["vllm-neuron-cache", "plan", str(model), *arguments])
    # `main` itself would end this process.
    assert not main.app(standalone_mode=False)
    load = json.loads(file.read_text())["load"]
    # Of 512x512 images the derived cache holds a handful, so that not every repeat is found.
    assert 0.2 < load["hit_rate"] < 0.5
    assert load["encoder_tokens_saved_fraction"] == pytest.approx(load["hit_rate"])
    assert load["saved_seconds_per_1000_requests"] == pytest.approx(256 * 40 / 1000 * load["hit_rate"])
    assert f"{load['hit_rate']:.1%}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "512"], "error: --sizes: '512' is not a size"),
        (["--sizes", "5000x1"], "more than 200 times the shorter"),
        (["--sizes", "30s"], "Qwen3-VL takes no audio"),
        (["--sizes", "1x1", "--sizes-file", "x"], "name the media twice"),
        (["--sizes-file", "nowhere.txt"], "cannot read the sizes in nowhere.txt"),
        (["--hbm-gib", "0.000001"], "at least two, of which one is scratch"),
        (["--reuse", "2"], "reuse is 2"),
        (["--tensor-parallel-size", "0"], "tensor_parallel_size is 0"),
        (["--dtype", "int8"], "dtype is 'int8'"),
        (["--encoder-attention-block-size", "2047"], "give a multiple of 4"),
        (["--json", "no/such/folder/plan.json"], "cannot write no/such/folder/plan.json"),
        (["--plot", "plan.bmp"], "cannot draw plan.bmp"),
        (["--hbm-gib", "much"], "--hbm-gib"),
    ],
)
def test_mistakes_are_one_message_and_a_status(model, tmp_path, arguments, message):
    result = run(model, *arguments, cwd=tmp_path)
    assert result.returncode == 2 and result.stdout == ""
    assert message in result.stderr and "Traceback" not in result.stderr


def test_a_model_that_is_not_there(tmp_path):
    result = run("Qwen/Qwen3-VL-32B-Instruct", cwd=tmp_path)
    assert result.returncode == 2 and "nothing is downloaded" in result.stderr


def test_a_budget_below_the_largest_item_is_an_answer(model):
    result = run(model, "--hbm-gib", "0.1", "--sizes", "512x512,4096x4096")
    assert result.returncode == 0
    assert "Refused on arrival: 4096x4096" in result.stdout and "encoder_cache_num_blocks_exact" in result.stdout

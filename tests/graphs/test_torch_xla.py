"""torch_xla's lazy mode on CPU: it aliases what a graph mutates by itself, and has one graph for each bucket."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_neuron_cache.graphs.encoder_write import encoder_stamp_spec, encoder_write_spec
from vllm_neuron_cache.graphs.merge import merge_rows_fat_spec, merge_rows_spec
from vllm_neuron_cache.graphs.spec import BufferShape, GraphSpec, flat_names, flatten, unflatten

# Looked for and not imported, see `hlo_folder`.
if find_spec("torch_xla") is None:
    pytest.skip("needs torch_xla; scripts/torch_xla_env runs these", allow_module_level=True)

pytestmark = pytest.mark.xla

BUFFER = BufferShape(9, 8, 16, torch.float32)
SPECS = {
    spec.name: spec
    for spec in (
        encoder_write_spec((2, 4), BUFFER),
        encoder_stamp_spec((2, 4), BUFFER.num_blocks),
        merge_rows_spec((2, 4), BUFFER, num_levels=3, max_step_tokens=16),
        merge_rows_fat_spec((2, 4), BUFFER, max_step_tokens=16),
    )
}
each_spec = pytest.mark.parametrize("name", SPECS)


@pytest.fixture(scope="module")
def hlo_folder(tmp_path_factory):
    """Where XLA leaves every module that it compiles. It reads this setting once, when torch_xla is first imported."""
    folder = tmp_path_factory.mktemp("hlo")
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    os.environ["XLA_FLAGS"] = f"--xla_dump_to={folder} --xla_dump_hlo_as_text"
    return folder


@pytest.fixture(scope="module")
def torch_xla(hlo_folder):
    return pytest.importorskip("torch_xla")


class Traced:
    """A call in lazy mode that has not run yet."""

    def __init__(self, torch_xla: Any, spec: GraphSpec, bucket: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        example = spec.example_args(bucket)
        names = flat_names(spec.fn, example)
        tensors: list[torch.Tensor] = []
        for name, tensor in zip(names, flatten(example)):
            # Indices are all different: which of two writes to one place wins is the compiler's choice.
            values = torch.randperm(spec.index_limits.get(name, 10_000), generator=generator)
            tensors.append(values[: tensor.numel()].view(tensor.shape).to(tensor.dtype))
        self.args = unflatten(tensors, example)
        lazy = [tensor.to(torch_xla.device()) for tensor in flatten(self.args)]
        torch_xla.sync(wait=True)
        spec.fn(*unflatten(lazy, example))
        mutated = spec.mutated_names(example)
        self.targets = [tensor for name, tensor in zip(names, lazy) if name in mutated]
        self.hash = torch_xla._XLAC._get_graph_hash(self.targets)


@each_spec
def test_mutated_arguments_are_aliased_and_nothing_else(torch_xla, hlo_folder, name):
    traced = Traced(torch_xla, SPECS[name], 2)
    before = set(hlo_folder.iterdir())
    torch_xla.sync(wait=True)
    (compiled,) = (path for path in set(hlo_folder.iterdir()) - before if path.name.endswith("after_optimizations.txt"))
    head = compiled.read_text().splitlines()[0]
    aliases = re.findall(r"\{(\d*)\}: \((\d+), \{\}, \w+-alias\)", head)
    takes, gives = re.search(r"entry_computation_layout=\{\((.*)\)->(.*)\}", head).groups()
    parameters, outputs = (re.findall(r"(\w+\[[\d,]*\])", side) for side in (takes, gives))
    assert sorted(int(output or 0) for output, _ in aliases) == list(range(len(traced.targets)))
    assert all(parameters[int(parameter)] == outputs[int(output or 0)] for output, parameter in aliases)
    assert len({parameter for _, parameter in aliases}) == len(traced.targets)


@each_spec
def test_one_graph_for_each_bucket_whatever_the_data(torch_xla, name):
    hashes = {bucket: {Traced(torch_xla, SPECS[name], bucket, seed).hash for seed in range(3)} for bucket in (2, 4)}
    assert [len(found) for found in hashes.values()] == [1, 1]
    assert hashes[2] != hashes[4]


def test_a_block_id_from_python_is_another_graph_each_time(torch_xla):
    hashes = set()
    for block_id in range(3):
        buffer, row = (torch.zeros(shape).to(torch_xla.device()) for shape in ((9, 8, 16), (8, 16)))
        torch_xla.sync(wait=True)
        buffer[block_id] = row
        hashes.add(torch_xla._XLAC._get_graph_hash([buffer]))
    assert len(hashes) == 3


@each_spec
def test_result_is_eagers(torch_xla, name):
    spec = SPECS[name]
    traced = Traced(torch_xla, spec, 2)
    spec.fn(*traced.args)
    mutated = spec.mutated_names(traced.args)
    names = flat_names(spec.fn, traced.args)
    expected = [tensor for arg, tensor in zip(names, flatten(traced.args)) if arg in mutated]
    for target, tensor in zip(traced.targets, expected, strict=True):
        assert torch.equal(target.cpu(), tensor)


# A second start ----------------------------------------------------------------------------------------------------

BLOCKS, STEP_TOKENS = 300, 4096
STARTS = {
    "first": (BLOCKS, STEP_TOKENS, 1),
    "second": (BLOCKS, STEP_TOKENS, 2),
    "one block more": (BLOCKS + 1, STEP_TOKENS),
    "shorter steps": (BLOCKS, 1024),
}


@pytest.fixture(scope="module")
def started():
    """By name: what a process found that started the cache, and the first two served steps, each with other data."""
    found: dict[str, Any] = {}

    def start(name: str) -> dict[str, Any]:
        if name not in found:
            script = Path(__file__).with_name("xla_graph_hashes.py")
            environment = os.environ | {"PJRT_DEVICE": "CPU"}
            environment.pop("XLA_FLAGS", None)
            run = subprocess.run(
                [sys.executable, script, *map(str, STARTS[name])],
                capture_output=True,
                text=True,
                timeout=600,
                env=environment,
            )
            assert run.returncode == 0, run.stderr[-5000:]
            found[name] = json.loads(run.stdout.splitlines()[-1])
        return found[name]

    return start


def test_a_second_start_has_the_graphs_of_the_first(started):
    """XLA keeps a compilation by this hash, and so does neuronx-cc's cache on disk: nothing is left to compile."""
    first, second = started("first")["warm_up"], started("second")["warm_up"]
    assert first == second
    assert [graph for graph in first if graph.startswith("encoder_write")] == [
        f"encoder_write {rows}" for rows in (64, 128, 256, 512, 1024, 2048)
    ]
    assert {"encoder_stamp 4", "encoder_stamp 32", "encoder_stamp 256"} <= set(first)
    assert {"merge_rows 64", "merge_rows 4096"} <= set(first)
    assert [len(hashes) for hashes in first.values()] == [1] * len(first)
    assert len({hashes[0] for hashes in first.values()}) == len(first)


@pytest.mark.parametrize("name", ["first", "second"])
def test_serving_makes_no_graph_that_warm_up_did_not(started, name):
    start = started(name)
    assert start["after_serving"] == start["warm_up"]
    assert set(start["calls"]) == set(start["warm_up"]) and start["rows_exact"] > STEP_TOKENS


def test_another_number_of_blocks_is_another_graph_in_every_bucket(started):
    first, other = started("first")["warm_up"], started("one block more")["warm_up"]
    assert first.keys() == other.keys()
    assert [graph for graph in first if first[graph] == other[graph]] == []


def test_another_length_of_step_is_another_merge_and_no_other_write(started):
    first, other = started("first")["warm_up"], started("shorter steps")["warm_up"]
    assert {graph.split()[0] for graph in other if first[graph] != other[graph]} == {"merge_rows"}
    assert "merge_rows 4096" not in other and "merge_rows 1024" in other


# A kernel in a graph of the older stack ----------------------------------------------------------------------------


def kernel_graph(torch_xla, monkeypatch, whole_buffer_copied=False):
    """What XLA gets of the write by a kernel; in the kernel's place a scatter, out of place as the older stack has it.
    The kernel itself is for a device."""
    pytest.importorskip("older_torch")
    from vllm_neuron_cache.graphs.catalog import write_spec
    from vllm_neuron_cache.graphs.functional import functional_form
    from vllm_neuron_cache.kernels import block_scatter

    def kernel(buffer, rows, row_ids, chunk):
        flat = buffer.view(-1, buffer.shape[2])
        new = flat.index_put((row_ids[:, 0],), rows).view(buffer.shape)
        return new + torch.zeros_like(new) if whole_buffer_copied else new

    monkeypatch.setattr(block_scatter, "block_scatter", kernel)
    spec = write_spec(BUFFER, "nki")
    args = spec.example_args(64)
    row_ids = torch.arange(64, dtype=torch.int32)[:, None]
    values = [torch.zeros(args[0].shape), torch.randn(args[1].shape), row_ids]
    form = functional_form(spec, args)
    lazy = [tensor.to(torch_xla.device()) for tensor in values]
    torch_xla.sync(wait=True)
    (new,) = form(form.states(lazy), form.inputs(lazy))
    hlo = torch_xla._XLAC._get_xla_tensors_hlo([new])
    assert torch.equal(new.cpu().flatten(0, 1)[:64], values[1])
    return hlo


@pytest.mark.parametrize("whole_buffer_copied", [False, True], ids=["kernel", "control"])
def test_an_operator_of_a_kernel_adds_no_pass_over_the_buffer(torch_xla, monkeypatch, whole_buffer_copied):
    hlo = kernel_graph(torch_xla, monkeypatch, whole_buffer_copied)
    entry = hlo[hlo.index("ENTRY") :]
    shapes = rf"f32\[(?:{BUFFER.num_blocks},{BUFFER.block_size}|{BUFFER.num_rows}),{BUFFER.fat_dim}\]\S* (\w[\w-]*)\("
    passes = set(re.findall(shapes, entry)) - {"parameter", "reshape", "transpose", "tuple"}
    assert "add" in passes if whole_buffer_copied else passes == {"scatter"}

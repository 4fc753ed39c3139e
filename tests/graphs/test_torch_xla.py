"""torch_xla's lazy mode on CPU: it aliases what a graph mutates by itself, and has one graph for each bucket."""

import os
import re
from importlib.util import find_spec
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

"""Each graph changes exactly the arguments that its spec declares."""

import inspect

import pytest
import torch

from vllm_neuron_cache.graphs.encoder_write import encoder_stamp_spec, encoder_write_spec
from vllm_neuron_cache.graphs.lanes import make_lane
from vllm_neuron_cache.graphs.lanes.inductor import compiler_available
from vllm_neuron_cache.graphs.merge import merge_multimodal_embeddings_spec, merge_rows_fat_spec, merge_rows_spec
from vllm_neuron_cache.graphs.spec import BufferShape


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def filled(*shape: int) -> torch.Tensor:
    return torch.full(shape, 0.5)


BUFFER = torch.arange(3 * 4 * 6, dtype=torch.float32).reshape(3, 4, 6)
SHAPE = BufferShape(*BUFFER.shape, BUFFER.dtype)
STEP = {"num_levels": 2, "max_step_tokens": 8}

CASES = [
    (encoder_write_spec((2,), SHAPE), (BUFFER, filled(2, 6), ids(1, 0), ids(3, 2))),
    (
        encoder_stamp_spec((2,), 3),
        (torch.zeros(3, 2, dtype=torch.int32), ids(0, 0, 0), ids(1, 0), torch.ones(2, 2, dtype=torch.int32), ids(5, 6)),
    ),
    (merge_rows_spec((2,), SHAPE, **STEP), (filled(9, 2), (filled(9, 2), filled(9, 2)), BUFFER, ids(3, 7), ids(0, 4))),
    (merge_rows_fat_spec((2,), SHAPE, max_step_tokens=8), (filled(9, 6), BUFFER, ids(3, 7), ids(0, 4))),
    (
        merge_multimodal_embeddings_spec((1,), SHAPE, **STEP),
        (filled(9, 2), (filled(9, 2), filled(9, 2)), BUFFER, ids(1), ids(8, 1, 2, 8).view(1, 4)),
    ),
]


@torch.inference_mode()
@pytest.mark.parametrize("lane_name", ["eager", "check", "inductor"])
@pytest.mark.parametrize(("spec", "example"), CASES, ids=[spec.name for spec, _ in CASES])
def test_the_declared_arguments_change_and_no_other(spec, example, lane_name):
    if lane_name == "inductor" and not compiler_available():
        pytest.skip("inductor needs a C++ compiler, and there is none")
    clone = lambda: tuple(tuple(t.clone() for t in arg) if isinstance(arg, tuple) else arg.clone() for arg in example)  # noqa: E731
    graph = make_lane(lane_name).lower(spec, spec.buckets[0], clone())
    args = clone()
    addresses = [arg.data_ptr() for arg in args if isinstance(arg, torch.Tensor)]
    assert not any(isinstance(result, torch.Tensor) for result in graph(*args) or ())
    changed = set()
    for name, before, after in zip(inspect.signature(spec.fn).parameters, example, args, strict=True):
        pairs = zip(before, after, strict=True) if isinstance(before, tuple) else [(before, after)]
        if not all(torch.equal(old, new) for old, new in pairs):
            changed.add(name)
    assert changed == set(spec.mutates)
    assert [arg.data_ptr() for arg in args if isinstance(arg, torch.Tensor)] == addresses

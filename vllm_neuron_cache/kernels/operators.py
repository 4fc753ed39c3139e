"""The kernels as operators that a graph calls.

A graph has one operator for each: traced, checked and hashed it is the same on every machine, and what is inside is the
kernel's. What runs is up to the device:

- on the CPU the kernel's PyTorch reference;
- on torch-xla, the older stack, the kernel called with XLA tensors, which its stack makes a custom call of:
  https://awsdocs-neuron.readthedocs-hosted.com/en/v2.28.1/nki/guides/framework_custom_op.html. There a graph is without
  mutation, so that what the kernel returns is the new value;
- on TorchNeuron, the native stack, what `torch_neuronx.nki_op` makes of `KernelOperator.call`. That is lane `neuron`'s
  to do.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vllm_neuron_cache.kernels import block_scatter, gather_merge

NAMESPACE = "vllm_neuron_cache"


class KernelOperator(NamedTuple):
    """One kernel."""

    name: str
    """For `GraphSpec.opaque`: the operator's, "namespace.name"."""
    mutates: str
    """The argument that it changes."""
    call: Callable[..., None]
    """Runs the kernel on its device."""
    plain: Callable[..., None]
    """The operator. Takes what `call` takes, and changes what `call` changes."""


def _operator(
    name: str, mutates: str, call: Callable[..., None], reference: Callable[..., None], on_xla: Callable[..., None]
) -> KernelOperator:
    plain = torch.library.custom_op(f"{NAMESPACE}::{name}", reference, mutates_args=(mutates,))
    plain.register_kernel("xla", on_xla)
    return KernelOperator(f"{NAMESPACE}.{name}", mutates, call, plain)


# The operators' signatures are read from these functions: torch takes no `Any` there. --------------------------------


def _scatter(buffer: Tensor, rows: Tensor, row_ids: Tensor, chunk: int) -> None:
    block_scatter.block_scatter(buffer, rows, row_ids, chunk)


def _scatter_reference(buffer: Tensor, rows: Tensor, row_ids: Tensor, chunk: int) -> None:
    block_scatter.block_scatter_reference(buffer, rows, row_ids)


def _scatter_on_xla(buffer: Tensor, rows: Tensor, row_ids: Tensor, chunk: int) -> None:
    buffer.copy_(block_scatter.block_scatter(buffer, rows, row_ids, chunk))


def _gather(target: Tensor, buffer: Tensor, src_rows: Tensor, dst_rows: Tensor, first_column: int, chunk: int) -> None:
    gather_merge.gather_merge(target, buffer, src_rows, dst_rows, first_column, chunk)


def _gather_reference(
    target: Tensor, buffer: Tensor, src_rows: Tensor, dst_rows: Tensor, first_column: int, chunk: int
) -> None:
    gather_merge.gather_merge_reference(target, buffer, src_rows, dst_rows, first_column)


def _gather_on_xla(
    target: Tensor, buffer: Tensor, src_rows: Tensor, dst_rows: Tensor, first_column: int, chunk: int
) -> None:
    target.copy_(gather_merge.gather_merge(target, buffer, src_rows, dst_rows, first_column, chunk))


BLOCK_SCATTER = _operator("block_scatter", "buffer", _scatter, _scatter_reference, _scatter_on_xla)
GATHER_MERGE = _operator("gather_merge", "target", _gather, _gather_reference, _gather_on_xla)


def plain(operator: KernelOperator) -> Callable[..., Any]:
    """For `GraphSpec.kernel_fn`: the operator itself."""
    return operator.plain

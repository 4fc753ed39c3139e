"""Every rule of the graph check refuses what it is for, and lets through what it is not for."""

import dataclasses
import functools
import inspect
import pickle
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from vllm_neuron_cache.errors import GraphRuleError, GraphViolation
from vllm_neuron_cache.graphs import check
from vllm_neuron_cache.graphs.check import GraphReport, check_graph, check_spec
from vllm_neuron_cache.graphs.encoder_write import encoder_stamp_spec, encoder_write_spec
from vllm_neuron_cache.graphs.merge import merge_multimodal_embeddings_spec, merge_rows_fat_spec, merge_rows_spec
from vllm_neuron_cache.graphs.spec import BufferShape, GraphSpec, flat_names
from vllm_neuron_cache.graphs.tracing import trace_graph

# Graphs below take arguments of these names: shape, dtype and, for indices, the limit of their values.
ARGUMENTS: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "buffer": ((4, 8), torch.float32),
    "other": ((4, 8), torch.float32),
    "square": ((8, 8), torch.float32),
    "rows": ((2, 8), torch.float32),
    "row": ((8,), torch.float32),
    "scalar": ((), torch.float32),
    "ids": ((2,), torch.int32),
    "id": ((), torch.int32),
    "none": ((0,), torch.int32),
    "unlimited": ((2,), torch.int32),
    "long_ids": ((2,), torch.int64),
    "grid": ((2, 8), torch.int32),
    "long_grid": ((2, 8), torch.int64),
    "tags": ((4, 8), torch.int32),
    "long_tags": ((4, 8), torch.int64),
    "long_rows": ((2, 8), torch.int64),
    "row_mask": ((4,), torch.bool),
    "mask": ((4, 8), torch.bool),
    "doubles": ((4, 8), torch.float64),
}
LIMITS = dict.fromkeys(("ids", "id", "none", "long_ids", "grid", "long_grid"), 4)
PAIR = ("targets",)
"""Arguments that are a tuple of two buffers."""


def args_of(fn: Callable[..., Any], device: str) -> tuple[Any, ...]:
    def make(name: str) -> torch.Tensor:
        shape, dtype = ARGUMENTS[name]
        return torch.ones(shape, dtype=dtype, device=device)

    parameters = inspect.signature(fn).parameters
    return tuple((make("buffer"), make("buffer")) if name in PAIR else make(name) for name in parameters)


@functools.cache
def compiled(fn: Callable[..., Any]) -> torch.fx.GraphModule:
    return trace_graph(fn.__name__, fn, args_of(fn, "meta"))


@functools.cache
def symbolic(fn: Callable[..., Any]) -> torch.fx.GraphModule:
    return make_fx(fn, tracing_mode="symbolic")(*args_of(fn, "cpu"))


@functools.cache
def recorded(fn: Callable[..., Any]) -> torch.fx.GraphModule:
    """As the function was run, for what does not get through `trace_graph`."""
    return make_fx(fn)(*args_of(fn, "cpu"))


def report_of(fn: Callable[..., Any], tracer: Callable[..., torch.fx.GraphModule] = compiled) -> GraphReport:
    parameters = inspect.signature(fn).parameters
    limits = {name: limit for name, limit in LIMITS.items() if name in parameters}
    return check_graph(tracer(fn), flat_names(fn, args_of(fn, "meta")), limits)


def rules_of(fn: Callable[..., Any], tracer: Callable[..., torch.fx.GraphModule] = compiled) -> set[str]:
    return {violation.rule for violation in report_of(fn, tracer).violations}


# Graphs that break a rule ------------------------------------------------------------------------------------------


class Breach(NamedTuple):
    rule: str
    fn: Callable[..., Any]
    said: str
    """What the violation says, with the node before it."""
    also: frozenset[str]
    """Other rules that cannot be kept where this one is broken so."""
    tracer: Callable[..., torch.fx.GraphModule]


BREACHES: list[Breach] = []
UNTRACEABLE: list[tuple[str, Callable[..., Any], str]] = []
SOUND: list[Callable[..., Any]] = []


def breaks(rule: str, said: str, *also: str, tracer: Callable[..., torch.fx.GraphModule] = compiled):
    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        BREACHES.append(Breach(rule, fn, said, frozenset(also), tracer))
        return fn

    return register


def ends_tracing(rule: str, said: str):
    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        UNTRACEABLE.append((rule, fn, said))
        return fn

    return register


def keeps_the_rules(fn: Callable[..., Any]) -> Callable[..., Any]:
    SOUND.append(fn)
    return fn


@breaks("dynamic_shape", r"add: .*'s\d+'", tracer=symbolic)
def size_is_a_symbol(buffer):
    return buffer + 1


@breaks("dynamic_shape", r"sym_size_int: .*'s\d+'", tracer=symbolic)
def size_is_computed(buffer):
    return buffer.view(buffer.shape[0] * 2, -1)


@breaks("dynamic_shape", "nonzero: .*'u0'", "data_dependent", tracer=symbolic)
def size_is_the_number_of_results(buffer):
    return buffer.nonzero()


@breaks("data_dependent", "nonzero: aten.nonzero.default", tracer=recorded)
def places_that_are_not_zero(buffer):
    return buffer.nonzero()


@breaks("data_dependent", "repeat_interleave: ", tracer=recorded)
def rows_repeated_as_often_as_an_argument_says(ids):
    return torch.repeat_interleave(ids)


@breaks("boolean_index", "index_put: aten.index_put.default selects by a mask")
def rows_written_by_mask(buffer, row_mask, row):
    buffer.index_put_((row_mask,), row)


@breaks("boolean_index", "index_put: ")
def constant_written_by_mask(buffer, row_mask):
    buffer[row_mask] = 0.0


@breaks("boolean_index", "masked_scatter: ")
def elements_scattered_by_mask(buffer, mask, other):
    buffer.masked_scatter_(mask, other)


@breaks("boolean_index", "index: aten.index.Tensor", tracer=recorded)
def rows_read_by_mask(buffer, row_mask):
    return buffer[row_mask]


@breaks("boolean_index", "masked_select: ", tracer=recorded)
def elements_read_by_mask(buffer, mask):
    return buffer.masked_select(mask)


@breaks("host_transfer", "_to_copy: .*cpu instead of meta")
def result_on_the_host(buffer):
    return buffer.cpu()


@breaks("host_transfer", "_to_copy: .*cpu instead of meta")
def sum_taken_over_the_host(buffer):
    return buffer + buffer.sum().cpu()


@breaks("host_transfer", "ones: .*cpu instead of meta")
def factory_on_another_device(buffer):
    return buffer * 2, torch.ones(8, device="cpu")


@breaks("host_transfer", "_tensor_constant0: is a constant of the host")
def number_in_a_tensor_of_the_host(buffer):
    return buffer + torch.tensor(2.0)


@breaks("host_transfer", "_tensor_constant0: is a constant of the host", tracer=recorded)
def list_in_a_tensor_of_the_host(buffer):
    return buffer + torch.tensor([1.0] * 8)


@breaks("host_transfer", "_local_scalar_dense: .*reads a value on the host", "dynamic_shape", tracer=symbolic)
def value_read_in_a_recorded_graph(buffer):
    return buffer + buffer.sum().item()


@breaks("mutation_through_view", "view: buffer .*aten.view.default")
def scatter_into_the_flat_buffer(buffer, ids, row):
    buffer.view(-1).scatter_(0, ids, row)


@breaks("mutation_through_view", "view: buffer .*aten.view.default")
def view_of_the_same_shape(buffer, ids, rows):
    buffer.view(4, 8).index_put_((ids,), rows)


@breaks("mutation_through_view", "select_scatter: buffer ")
def copy_into_a_row(buffer, row):
    buffer[0].copy_(row)


@breaks("mutation_through_view", "select_scatter: buffer ")
def assignment_to_a_row(buffer, row):
    buffer[0] = row


@breaks("mutation_through_view", "slice_scatter: buffer ")
def scatter_into_a_slice(buffer, rows, id):
    buffer[:4, 1:3].index_put_((id,), rows[0, :2])


@breaks("mutation_through_view", "slice_scatter_1: square ")
def scatter_into_a_slice_of_a_slice(square, id, row):
    square[1:][:4].index_put_((id,), row)


@breaks("mutation_through_view", "slice_scatter: buffer ")
def arithmetic_on_a_part(buffer):
    buffer.narrow(0, 1, 2).mul_(2)


@breaks("mutation_through_view", "transpose: square ")
def scatter_into_the_transpose(square, ids, rows):
    square.transpose(0, 1).index_put_((ids,), rows)


@breaks("mutation_through_view", "permute: square ")
def scatter_into_moved_dimensions(square, ids, rows):
    square.movedim(0, 1).index_put_((ids,), rows)


@breaks("mutation_through_view", "view_2: buffer ")
def view_of_a_view_of_a_view(buffer, row):
    buffer.view(2, 2, 8)[1].view(-1)[:8].copy_(row)


@breaks("mutation_through_view", "select_scatter: buffer ")
def copy_into_one_of_many(buffer, row):
    buffer.unbind(0)[1].copy_(row)


@breaks("mutation_through_view", "diagonal_scatter: buffer ")
def copy_into_the_diagonal(buffer, row):
    buffer.diagonal().copy_(row[:4])


@breaks("mutation_through_view", "detach: buffer ")
def scatter_into_the_detached_buffer(buffer, ids, rows):
    buffer.detach().index_put_((ids,), rows)


@breaks("mutation_through_view", "view: buffer .*aten.view.dtype")
def scatter_into_the_bits(buffer, ids, grid):
    buffer.view(torch.int32).index_put_((ids,), grid)


@breaks("mutation_through_view", r"slice_scatter: targets\[1\] ")
def view_of_a_member_of_a_tuple(targets, ids, rows):
    targets[0].index_put_((ids,), rows)
    targets[1][1:3].copy_(rows)


@breaks("read_before_write", "sum_1: reads buffer, which index_put changes")
def sum_before_the_update(buffer, ids, rows):
    total = buffer.sum()
    buffer.index_put_((ids,), rows)
    return total


@breaks("read_before_write", "view: reads buffer")
def sum_of_a_view_before_the_update(buffer, ids, rows):
    total = buffer.view(-1).sum()
    buffer.index_put_((ids,), rows)
    return total


@breaks("read_before_write", "index_select: reads buffer")
def rows_computed_from_rows(buffer, ids):
    buffer.index_put_((ids,), buffer.index_select(0, ids) * 2)


@breaks("read_before_write", r"slice_1: reads targets\[1\], which index_put_1 changes")
def one_target_reads_what_the_next_had(targets, ids, rows):
    targets[0].index_put_((ids,), targets[1][:2])
    targets[1].index_put_((ids,), rows)


@breaks("mutated_returned", "output: returns buffer")
def buffer_returned(buffer, ids, rows):
    return buffer.index_put_((ids,), rows)


@breaks("mutated_returned", "output: returns buffer")
def view_of_the_buffer_returned(buffer, ids, rows):
    buffer.index_put_((ids,), rows)
    return {"flat": buffer.view(-1)}


@breaks("mutated_returned", "output: returns buffer")
def row_of_the_buffer_returned(buffer, ids, rows):
    buffer.index_put_((ids,), rows)
    return rows, buffer[0]


@breaks("mutated_returned", "output: returns buffer")
def part_of_the_split_buffer_returned(buffer, ids, rows):
    buffer.index_put_((ids,), rows)
    return buffer.split(2)[1].expand(3, 2, 8)


@breaks("mutated_returned", r"output: returns targets\[0\]")
def member_of_a_tuple_returned(targets, ids, rows):
    targets[0].index_put_((ids,), rows)
    return targets[0].detach(), targets[1]


@breaks("whole_buffer_rewrite", "mul: replaces buffer as a whole")
def buffer_scaled(buffer):
    buffer.mul_(2)


@breaks("whole_buffer_rewrite", "copy: replaces buffer ")
def buffer_replaced_by_another(buffer, other):
    buffer.copy_(other)


@breaks("whole_buffer_rewrite", "zero: replaces buffer ")
def buffer_zeroed(buffer):
    buffer.zero_()


@breaks("whole_buffer_rewrite", "copy: replaces buffer ")
def rows_replaced_by_where(buffer, row_mask, other):
    buffer.copy_(torch.where(row_mask[:, None], other, buffer))


@breaks("whole_buffer_rewrite", "masked_fill: replaces buffer ")
def elements_filled_by_mask(buffer, mask):
    buffer.masked_fill_(mask, 0.0)


@breaks("whole_buffer_rewrite", "copy: replaces buffer ")
def functional_update_copied_back(buffer, ids, rows):
    buffer.copy_(buffer.index_put((ids,), rows))


@breaks("whole_buffer_rewrite", "mul: replaces buffer ")
def rows_written_and_all_scaled(buffer, ids, rows):
    buffer.index_put_((ids,), rows)
    buffer.mul_(2)


@breaks("whole_buffer_rewrite", "mul: replaces buffer ", "read_before_write")
def all_scaled_and_rows_written(buffer, ids, rows):
    buffer.mul_(2)
    buffer.index_put_((ids,), rows)


@breaks("whole_buffer_rewrite", "index_select: replaces rows ")
def result_written_to_an_out_argument(rows, buffer, ids):
    torch.index_select(buffer, 0, ids, out=rows)


@breaks("whole_buffer_rewrite", "add: replaces scalar ")
def counter_raised(scalar):
    scalar.add_(1)


@breaks("int64_index", "index_put: .*int64 indices arg1_1")
def rows_written_by_int64(buffer, long_ids, rows):
    buffer.index_put_((long_ids,), rows)


@breaks("int64_index", "scatter: .*int64 indices")
def scatter_as_eager_wants_it(buffer, long_grid, rows):
    buffer.scatter_(0, long_grid, rows)


@breaks("int64_index", "index_copy: .*int64 indices")
def index_copy_as_eager_wants_it(buffer, long_ids, rows):
    buffer.index_copy_(0, long_ids, rows)


@breaks("int64_index", "index_fill: .*int64 indices")
def index_fill_as_eager_wants_it(buffer, long_ids):
    buffer.index_fill_(0, long_ids, 2.0)


@breaks("int64_index", "gather: .*int64 indices")
def gather_as_eager_wants_it(buffer, long_grid):
    return buffer.gather(0, long_grid)


@breaks("int64_index", "take: .*int64 indices")
def take_as_eager_wants_it(buffer, long_ids):
    return buffer.take(long_ids)


@breaks("int64_index", "index: .*int64 indices _to_copy")
def indices_widened(buffer, ids):
    return buffer[ids.long()]


@breaks("int64_index", "embedding: .*int64 indices")
def embedding_by_int64(buffer, long_ids):
    return torch.nn.functional.embedding(long_ids, buffer)


@breaks("int64_index", "index_put: .*int64 values")
def int64_buffer(long_tags, ids, long_rows):
    long_tags.index_put_((ids,), long_rows)


@breaks("int64_index", "scatter: .*int64 values")
def int64_buffer_scattered(long_tags, grid, long_rows):
    long_tags.scatter_(0, grid, long_rows)


@breaks("unordered_scatter", "index_put_1: is one of 2 updates of buffer")
def two_updates(buffer, ids, rows):
    buffer.index_put_((ids,), rows)
    buffer.index_put_((ids,), rows * 2)


@breaks("unordered_scatter", "index_put: .*accumulates")
def update_that_accumulates(buffer, ids, rows):
    buffer.index_put_((ids,), rows, accumulate=True)


@breaks("unordered_scatter", "index_add: .*accumulates")
def rows_added(buffer, ids, rows):
    buffer.index_add_(0, ids, rows)


@breaks("unordered_scatter", "scatter_reduce: .*accumulates")
def rows_reduced(buffer, grid, rows):
    buffer.scatter_reduce_(0, grid, rows, "amax")


@breaks("unordered_scatter", "index_reduce: .*accumulates")
def rows_reduced_by_index(buffer, ids, rows):
    return buffer.index_reduce(0, ids, rows, "amax")


@breaks("index_out_of_range", "index_put: .* of 4 to 4 into dimension 0 of 4")
def sentinel_without_a_row_for_it(buffer, ids, rows):
    buffer.index_put_((torch.full_like(ids, 4),), rows)


@breaks("index_out_of_range", "index_put: .* of -1 to -1 into dimension 0 of 4")
def last_row_counted_from_the_end(buffer, ids, rows):
    buffer.index_put_((torch.full_like(ids, -1),), rows)


@breaks("index_out_of_range", "index_put: .* add of 1 to 4 into dimension 0 of 4")
def indices_one_too_high(buffer, ids, rows):
    buffer.index_put_((ids + 1,), rows)


@breaks("index_out_of_range", "index_put: .* sub of -1 to 2 into")
def indices_one_too_low(buffer, ids, rows):
    buffer.index_put_((ids - 1,), rows)


@breaks("index_out_of_range", "index: .* of -inf to inf into dimension 0 of 4")
def product_that_overflows(buffer, ids):
    return buffer[ids * 2**30 * 4]


@breaks("index_out_of_range", "index_select: .*arg1_1 of -inf to inf into dimension 0")
def indices_without_a_limit(buffer, unlimited):
    return buffer.index_select(0, unlimited)


@breaks("index_out_of_range", "index_select: .* of 6 to 9 into dimension -1 of 8")
def columns_out_of_range(buffer, ids):
    return buffer.index_select(-1, ids + 6)


@breaks("index_out_of_range", "index: .* into dimension 1 of 8")
def second_index_out_of_range(buffer, ids):
    return buffer[ids, ids * 3]


@breaks("index_out_of_range", "embedding: ")
def embedding_out_of_range(buffer, ids):
    return torch.nn.functional.embedding(ids * 2, buffer)


@breaks("index_out_of_range", "take: .* into all elements of 32", "int64_index")
def take_out_of_range(buffer, long_ids):
    return buffer.take(long_ids * 11)


@breaks("index_out_of_range", "index_fill: ")
def fill_of_a_temporary_out_of_range(buffer, ids):
    return torch.zeros_like(buffer).index_fill_(0, ids + 1, 1.0)


@breaks("index_out_of_range", "index: .* of -inf to inf")
def indices_rounded_by_bfloat16(buffer, ids):
    return buffer.repeat(65, 1)[(ids + 256).bfloat16().int()]


@breaks("index_out_of_range", "index: .* of -3 to -2")
def truth_as_a_number(buffer, ids):
    return buffer[(ids + 3).bool().int() - 3]


@breaks("index_out_of_range", "index: .* of -1 to 5")
def difference_with_a_factor(buffer, ids):
    return buffer[torch.rsub(ids, 5, alpha=2)]


@breaks("unsupported_operator", "sort: aten.sort.default: .*NCC_EVRF029")
def rows_sorted(buffer):
    return buffer.sort()[0]


@breaks("unsupported_operator", "topk: ")
def largest_rows(buffer):
    return buffer.topk(2)[0]


@breaks("unsupported_operator", "sort: ")
def places_of_the_sorted(buffer):
    return buffer.argsort()


@breaks("unsupported_operator", "_to_copy: is torch.complex64: NCC_EVRF004")
def complex_numbers(buffer):
    return buffer.to(torch.complex64)


@breaks("unsupported_operator", "_fft_r2c: is torch.complex64")
def fourier_transform(buffer):
    return torch.fft.fft(buffer)


@breaks("unsupported_operator", "_to_copy: is torch.float64")
def double_precision(buffer):
    return buffer.double()


@breaks("unsupported_operator", "arg0_1: is torch.float64")
def double_precision_argument(doubles):
    return doubles.sum().float()


_library = torch.library.Library("test_check", "FRAGMENT")
_library.define("twice(Tensor x) -> Tensor")
_library.impl("twice", lambda x: x + x, "CPU")
_library.impl("twice", torch.empty_like, "Meta")


@breaks("opaque_operator", "twice: test_check.twice is none of torch's operators, and not declared in opaque")
def operator_of_another_library(buffer):
    return torch.ops.test_check.twice(buffer)


@breaks("unsupported_operator", "scatter_reduce: .*NCC_EVRF016", "unordered_scatter")
def integers_reduced(tags, grid):
    tags.scatter_reduce_(0, grid, grid, "amax")


@ends_tracing("host_transfer", "_local_scalar_dense")
def value_read(buffer):
    return buffer + buffer.sum().item()


@ends_tracing("host_transfer", "_local_scalar_dense")
def list_read(buffer):
    return buffer * len(buffer[0].tolist())


@ends_tracing("host_transfer", "_local_scalar_dense")
def branch_on_a_value(buffer):
    return buffer + 1 if buffer.sum() > 0 else buffer - 1


@ends_tracing("host_transfer", "_local_scalar_dense")
def slice_from_a_value(buffer, ids):
    return buffer[ids[0] :]


@ends_tracing("host_transfer", "_local_scalar_dense")
def assertion_on_values(buffer):
    assert (buffer > 0).all()


@ends_tracing("host_transfer", "aten.equal")
def comparison_of_tensors(buffer, other):
    return buffer if torch.equal(buffer, other) else other


@ends_tracing("host_transfer", "two devices, meta and cpu")
def constant_made_on_the_host(buffer):
    return buffer + torch.tensor([1.0] * 8)


@ends_tracing("host_transfer", "two devices, meta and cpu")
def factory_without_a_device(buffer):
    return buffer + torch.ones(8)


CAPTURED = torch.ones(8)


@ends_tracing("host_transfer", "make it an argument")
def tensor_from_outside(buffer):
    return buffer + CAPTURED


@ends_tracing("data_dependent", "aten.nonzero")
def places_found(buffer):
    return buffer.nonzero()


@ends_tracing("data_dependent", "aten.nonzero")
def places_found_by_where(mask):
    return torch.where(mask)


@ends_tracing("data_dependent", "unique")
def different_values(buffer):
    return buffer.unique()


@ends_tracing("data_dependent", "bincount")
def how_often_each(ids):
    return torch.bincount(ids)


@ends_tracing("boolean_index", "aten.nonzero")
def rows_between_brackets(buffer, row_mask):
    return buffer[row_mask]


@ends_tracing("boolean_index", "masked_select")
def elements_selected(buffer, mask):
    return buffer.masked_select(mask)


@ends_tracing("whole_buffer_rewrite", "tensor 0: .*shape or layout")
def argument_resized(buffer):
    buffer.resize_(2, 8)


@ends_tracing("whole_buffer_rewrite", "tensor 1: .*shape or layout")
def argument_transposed(other, square, ids, rows):
    square.t_()


@breaks("unordered_scatter", ".*accumulates", "int64_index")
def a_number_added_to_elements(buffer, long_grid):
    buffer.scatter_(0, long_grid, 1.0, reduce="add")


@breaks("index_out_of_range", ".*cannot follow")
def bags_of_rows(square, unlimited):
    return torch.nn.functional.embedding_bag(unlimited.view(1, 2), square)


@breaks("unordered_scatter", ".*accumulates")
def elements_put_and_added(tags, ids):
    tags.put_(ids, torch.zeros_like(ids), accumulate=True)


@keeps_the_rules
def rows_written(buffer, ids, rows):
    buffer.index_put_((ids,), rows)


@keeps_the_rules
def rows_written_between_brackets(buffer, ids, rows):
    buffer[ids] = rows


@keeps_the_rules
def rows_written_beside_zeros_of_the_same_kind(buffer, ids):
    buffer.index_put_((ids,), buffer.new_zeros(2, 8) + torch.zeros_like(buffer)[:2] * 0)


@keeps_the_rules
def rows_written_at_halves_and_remainders(square, ids, rows):
    square.index_put_((ids // 2 + ids % 4,), rows)


@keeps_the_rules
def columns_written(square, ids):
    square[:, ids] = 0.0


@keeps_the_rules
def rows_copied_by_int32(buffer, ids, rows):
    buffer.index_copy_(0, ids, rows)


@keeps_the_rules
def new_value_read(buffer, ids, rows):
    buffer.index_put_((ids,), rows)
    return buffer.sum(), buffer[0] + 1


@keeps_the_rules
def row_named_before_the_update_and_read_after(buffer, ids, rows):
    row = buffer[0]
    buffer.index_put_((ids,), rows)
    return row + 1


@keeps_the_rules
def copy_of_the_buffer_returned(buffer, ids, rows):
    buffer.index_put_((ids,), rows)
    return buffer.clone()


@keeps_the_rules
def argument_returned_that_is_not_mutated(buffer, other, ids, rows):
    buffer.index_put_((ids,), rows)
    return other, other.view(-1), rows[0]


@keeps_the_rules
def one_target_reads_what_another_became(targets, ids, rows):
    targets[0].index_put_((ids,), rows)
    targets[1].index_put_((ids,), targets[0][:2])


@keeps_the_rules
def nothing_mutated(buffer, ids):
    return buffer.index_select(0, ids)


@keeps_the_rules
def nothing_done(buffer):
    return None


@keeps_the_rules
def scalar_written_to_one_row(buffer, id, scalar):
    buffer.index_put_((id,), scalar)


@keeps_the_rules
def empty_bucket(buffer, none, rows):
    buffer.index_put_((none,), rows[:0])


@keeps_the_rules
def functions_within_functions(targets, ids, rows):
    def write(target):
        rows_written(target, ids, rows)

    for target in targets:
        write(target)


@keeps_the_rules
def temporary_changed_as_it_likes(buffer, ids, rows):
    work = buffer * 2
    work.mul_(2)
    work[0].zero_()
    work[1:3] = rows
    return work


@keeps_the_rules
def indices_brought_into_range(buffer, ids, unlimited):
    return buffer[(ids * 2**30 * 4).clamp(0, 3)], buffer[unlimited.clamp(0, 3)], buffer[torch.where(ids > 2, ids, 1)]


@keeps_the_rules
def comparison_as_an_index(buffer, unlimited):
    return buffer[(unlimited > 7).int()]


def by_name(value: Any) -> str:
    return value.fn.__name__ if isinstance(value, Breach) else getattr(value, "__name__", None) or str(value)


@pytest.mark.parametrize("breach", BREACHES, ids=by_name)
def test_a_breach_is_reported_under_its_rule_with_its_node(breach):
    report = report_of(breach.fn, breach.tracer)
    assert {violation.rule for violation in report.violations} == {breach.rule, *breach.also}
    said = [f"{node}: {text}" for rule, node, text in report.violations if rule == breach.rule]
    assert any(re.match(breach.said, line) for line in said), said


@pytest.mark.parametrize("breach", BREACHES, ids=by_name)
def test_without_its_rule_a_breach_is_not_reported(breach, monkeypatch):
    monkeypatch.delitem(check.RULES, breach.rule)
    assert rules_of(breach.fn, breach.tracer) == breach.also


def test_every_rule_has_a_breach():
    assert {breach.rule for breach in BREACHES} == set(check.RULES)
    assert {rule for rule, _, _ in UNTRACEABLE} <= set(check.RULES)


@pytest.mark.parametrize(("rule", "fn", "said"), UNTRACEABLE, ids=by_name)
def test_what_cannot_be_traced_is_refused_under_its_rule(rule, fn, said):
    with pytest.raises(GraphRuleError, match=rf"^graph {fn.__name__}: \[{rule}\] .*{said}"):
        compiled(fn)


@pytest.mark.parametrize("fn", SOUND, ids=by_name)
def test_a_graph_that_keeps_the_rules_is_accepted(fn):
    assert report_of(fn).violations == ()


@pytest.mark.parametrize("same", [lambda buffer: buffer, lambda buffer: buffer[:2]], ids=["the same", "a part"])
def test_arguments_that_share_memory_are_refused(same):
    buffer, ids = torch.zeros(4, 8), torch.zeros(2, dtype=torch.int32)

    def read_and_write(buffer: torch.Tensor, other: torch.Tensor, ids: torch.Tensor) -> None:
        buffer.index_put_((ids,), other[:2])

    with pytest.raises(GraphRuleError, match=r"alias_map.*share memory"):
        trace_graph("read_and_write", read_and_write, (buffer, same(buffer), ids))


def test_an_argument_that_lies_on_the_host_is_refused():
    args = torch.zeros(4, 8, device="meta"), torch.zeros(2, dtype=torch.int32), torch.zeros(2, 8, device="meta")
    graph = trace_graph("rows_written", rows_written, args)
    (violation,) = check_graph(graph, ("buffer", "ids", "rows"), {"ids": 4}).violations
    assert violation.rule == "host_transfer" and "cpu instead of meta" in violation.text


def test_the_report_names_operators_and_aliases():
    report = report_of(functions_within_functions)
    assert report.operators == {"aten.copy_.default": 2, "aten.index_put.default": 2}
    assert report.aliases == {"targets[0]": 0, "targets[1]": 1}
    assert report_of(nothing_mutated).aliases == {}


def test_a_graph_error_survives_the_way_between_processes():
    error = GraphRuleError("write", [GraphViolation("alias_map", "buffer", "is mutated")])
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.graph, copy.violations) == (str(error), "write", error.violations)


# Specs -------------------------------------------------------------------------------------------------------------

BUCKETS = (1, 2, 8)
LEVELS = 3


def every_spec(buffer: BufferShape, max_step_tokens: int = 16) -> tuple[GraphSpec, ...]:
    step = {"max_step_tokens": max_step_tokens}
    return (
        encoder_write_spec(BUCKETS, buffer),
        encoder_stamp_spec(BUCKETS, buffer.num_blocks),
        merge_rows_spec(BUCKETS, buffer, num_levels=LEVELS, **step),
        merge_rows_fat_spec(BUCKETS, buffer, **step),
        merge_multimodal_embeddings_spec(BUCKETS, buffer, num_levels=LEVELS, **step),
    )


def small_spec(name: str) -> GraphSpec:
    return next(spec for spec in every_spec(BufferShape(5, 4, 8, torch.float32)) if spec.name == name)


LEVEL_TARGETS = {"hidden": 0, "deepstack[0]": 1, "deepstack[1]": 2, "deepstack[2]": 3}
ALIASES: Mapping[str, dict[str, int]] = {
    "encoder_write": {"buffer": 0},
    "encoder_stamp": {"mm_hash_tags": 0, "generations": 1},
    "merge_rows": LEVEL_TARGETS,
    "merge_rows_fat": {"fat": 0},
    "merge_multimodal_embeddings": LEVEL_TARGETS,
}


@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ALIASES)
def test_every_spec_keeps_the_rules_in_every_bucket(name, dtype, bucket):
    (spec,) = (spec for spec in every_spec(BufferShape(5, 4, 8, dtype)) if spec.name == name)
    report = check_spec(spec, bucket)
    assert report.aliases == ALIASES[name]
    assert report.operators["aten.index_put.default"] == len(ALIASES[name])
    gathers = report.operators.get("aten.index_select.default", 0)
    assert gathers == int(name.startswith("merge"))
    assert set(report.operators) <= {
        "aten.copy_.default",
        "aten.index_put.default",
        "aten.index_select.default",
        "aten.slice.Tensor",
        "aten.view.default",
    }


def test_a_buffer_larger_than_any_memory_is_checked_without_allocating_it():
    for spec in every_spec(BufferShape(100_000, 512, 20_480, torch.bfloat16), max_step_tokens=1_000_000):
        assert check_spec(spec, BUCKETS[-1]).aliases == ALIASES[spec.name]


@torch.inference_mode()
def test_specs_are_checked_in_inference_mode_too():
    for spec in every_spec(BufferShape(5, 4, 8, torch.float32)):
        check_spec(spec, BUCKETS[0])


@pytest.mark.parametrize(
    ("name", "mutates", "said"),
    [
        ("encoder_write", (), "buffer: is mutated, and not declared"),
        ("encoder_write", ("buffer", "rows"), "rows: is declared in mutates, and not mutated"),
        ("encoder_write", ("buffer", "bufer"), "bufer: is declared in mutates, and not mutated"),
        ("encoder_stamp", ("mm_hash_tags",), "generations: is mutated, and not declared"),
        ("merge_rows", ("hidden",), r"deepstack\[0\]: is mutated, and not declared.*deepstack\[2\]: is mutated"),
    ],
)
def test_a_spec_that_declares_other_mutations_is_refused(name, mutates, said):
    with pytest.raises(GraphRuleError, match=rf"graph {name}: \[alias_map\] {said}") as raised:
        check_spec(dataclasses.replace(small_spec(name), mutates=mutates), 2)
    assert {violation.rule for violation in raised.value.violations} == {"alias_map"}


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("encoder_write", "block_ids"),
        ("encoder_write", "block_rows"),
        ("encoder_stamp", "block_ids"),
        ("merge_rows", "src_rows"),
        ("merge_rows", "dst_rows"),
        ("merge_rows_fat", "dst_rows"),
        ("merge_multimodal_embeddings", "encoder_block_ids"),
        ("merge_multimodal_embeddings", "encoder_positions"),
    ],
)
def test_a_limit_one_too_high_is_out_of_range(name, argument):
    spec = small_spec(name)
    limits = {**spec.index_limits, argument: spec.index_limits[argument] + 1}
    with pytest.raises(GraphRuleError, match="index_out_of_range") as raised:
        check_spec(dataclasses.replace(spec, index_limits=limits), 2)
    assert {violation.rule for violation in raised.value.violations} == {"index_out_of_range"}


def test_the_sentinel_needs_a_row_of_its_own():
    """Targets of T rows instead of T + 1, and padding that still names row T."""
    spec = small_spec("merge_rows_fat")

    def without_dummy_row(bucket: int) -> tuple[Any, ...]:
        fat, *others = spec.example_args(bucket)
        return fat[:-1].clone(), *others

    with pytest.raises(GraphRuleError, match=r"index_out_of_range.* of 0 to 16 into dimension 0 of 16"):
        check_spec(dataclasses.replace(spec, example_args=without_dummy_row), 2)

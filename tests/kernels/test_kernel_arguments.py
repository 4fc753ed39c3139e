"""The kernels' host functions: what they hand to the device, and what they refuse. NKI is not needed for them."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from kernel_checks import MODULES

from vllm_neuron_cache.errors import ConfigurationError
from vllm_neuron_cache.graphs.spec import BufferShape
from vllm_neuron_cache.kernels.block_scatter import block_scatter_args
from vllm_neuron_cache.kernels.compact_blocks import compact_blocks_args
from vllm_neuron_cache.kernels.gather_merge import gather_merge_args
from vllm_neuron_cache.kernels.limits import MAX_CHUNK_BYTES, MAX_TENSOR_BYTES, SBUF_PARTITION_BYTES, row_chunk

SHAPE = BufferShape(5, 4, 12, torch.bfloat16)
COARSE = BufferShape(2, 8, 12, torch.bfloat16)


def ints(*values):
    return np.array(values, dtype=np.int32)


PLACES = ints(0, 1), ints(3, 0)
PAIRS = ints(0, 19), ints(3, 0)


def scatter_args(block_ids=PLACES[0], block_rows=PLACES[1], shape=SHAPE, **settings):
    return block_scatter_args(shape, block_ids, block_rows, scratch_block=4, **settings)


def merge_args(src=PAIRS[0], dst=PAIRS[1], shape=SHAPE, num_levels=3, dummy_row=6, **settings):
    return gather_merge_args(shape, src, dst, num_levels=num_levels, dummy_row=dummy_row, **settings)


def compact_args(coarse=COARSE, shape=SHAPE, **changes):
    settings = {"coarse_tokens": (5,), "block_ids": ints(2, 0), "tokens_per_block": (4, 1), "num_rows": 6}
    return compact_blocks_args(coarse, shape, scratch_block=4, **(settings | changes))


def test_places_become_rows_of_the_flattened_buffer_and_the_scratch_block_the_sentinel():
    args = scatter_args(ints(0, 4, 3, 4), ints(3, 0, 1, 0))
    assert args.row_ids.tolist() == [[3], [-1], [13], [-1]] and args.row_ids.dtype == np.int32


def test_pairs_that_write_the_dummy_row_or_repeat_a_pair_go_nowhere():
    args = merge_args(ints(1, 16, 2, 1, 16), ints(0, 6, 3, 0, 6))
    assert args.dst_rows.tolist() == [[0], [-1], [3], [-1], [-1]]
    assert args.src_rows[:, 0].tolist() == [1, 16, 2, 1, 16] and args.columns == (0, 3, 6, 9)


def test_the_row_map_follows_both_layouts():
    args = compact_args(coarse_tokens=(3, 2), num_rows=7)
    assert args.src_rows[:, 0].tolist() == [0, 1, 2, 8, 9, 0, 0]
    assert args.dst_rows[:, 0].tolist() == [8, 9, 10, 11, 0, -1, -1]


def test_a_chunk_is_the_whole_row_where_it_fits_and_equal_parts_where_it_does_not():
    assert row_chunk(20480, torch.bfloat16) == 20480 and row_chunk(20480, torch.float32) == 10240
    largest = MAX_CHUNK_BYTES // 2
    assert row_chunk(largest, torch.bfloat16) == largest and row_chunk(largest + 1, torch.bfloat16) == largest // 2 + 1
    assert 4 * MAX_CHUNK_BYTES < SBUF_PARTITION_BYTES


LARGE = BufferShape(MAX_TENSOR_BYTES // 64, 4, 12, torch.bfloat16)
SIZES = {
    "a dtype that no kernel takes": lambda: scatter_args(shape=SHAPE._replace(dtype=torch.float64)),
    "a buffer out of an index's reach": lambda: scatter_args(shape=LARGE),
    "a buffer out of a merge's reach": lambda: merge_args(shape=LARGE),
    "coarse blocks out of reach": lambda: compact_args(coarse=LARGE),
    "a target out of reach": lambda: merge_args(dummy_row=MAX_TENSOR_BYTES),
    "a chunk too large": lambda: scatter_args(chunk=MAX_CHUNK_BYTES // 2 + 1),
    "a chunk of nothing": lambda: merge_args(chunk=0),
    "levels that do not divide the row": lambda: merge_args(num_levels=4),
    "rows of two widths": lambda: compact_args(coarse=COARSE._replace(fat_dim=10)),
    "rows of two dtypes": lambda: compact_args(coarse=COARSE._replace(dtype=torch.float32)),
}
VALUES = {
    "ids of 64 bits": lambda: scatter_args(np.array([0, 1])),
    "rows of 64 bits": lambda: merge_args(dst=np.array([0, 1])),
    "ids in a column": lambda: scatter_args(ints(0, 1)[:, None]),
    "lists of two lengths": lambda: scatter_args(ints(0)),
    "pairs of two lengths": lambda: merge_args(ints(0)),
    "a block too many": lambda: scatter_args(ints(0, 5)),
    "a negative block": lambda: scatter_args(ints(0, -1)),
    "a row past its block": lambda: scatter_args(block_rows=ints(3, 4)),
    "a source past the buffer": lambda: merge_args(ints(0, 20)),
    "a destination past the dummy row": lambda: merge_args(dst=ints(0, 7)),
    "a place written twice": lambda: scatter_args(ints(1, 1), ints(2, 2)),
    "a row filled from two sources": lambda: merge_args(dst=ints(2, 2)),
    "a block owned twice": lambda: compact_args(block_ids=ints(2, 2)),
    "the scratch block owned": lambda: compact_args(block_ids=ints(2, 4)),
    "a block without a count": lambda: compact_args(block_ids=ints(2)),
    "more rows than a coarse block has": lambda: compact_args(coarse_tokens=(9,)),
    "more coarse blocks than there are": lambda: compact_args(coarse_tokens=(2, 2, 1)),
    "more rows than a block has": lambda: compact_args(tokens_per_block=(5, 0)),
    "layouts of two items": lambda: compact_args(coarse_tokens=(6,)),
    "more rows than the lists": lambda: compact_args(num_rows=4),
}


@pytest.mark.parametrize("call", SIZES.values(), ids=SIZES)
def test_sizes_that_the_device_cannot_take_are_refused(call):
    with pytest.raises(ConfigurationError, match=r"\d"):
        call()


@pytest.mark.parametrize("call", VALUES.values(), ids=VALUES)
def test_wrong_lists_are_refused(call):
    with pytest.raises(ValueError, match=r"\d") as raised:
        call()
    assert not isinstance(raised.value, ConfigurationError)


def test_host_functions_and_references_need_neither_nki_nor_vllm():
    program = "import sys, {}; print(*sys.modules)".format(
        ", ".join(f"vllm_neuron_cache.kernels.{name}" for name in MODULES)
    )
    blocked = "import sys; sys.modules['nki'] = None; "
    run = subprocess.run([sys.executable, "-c", blocked + program], capture_output=True, text=True, check=True)
    assert not {"vllm", "nki.isa"} & set(run.stdout.split())


@pytest.mark.parametrize("placeholder", ["None", "types.ModuleType('nki')"])
def test_kernel_nki_without_nki_says_what_is_missing(placeholder):
    program = (
        f"import sys, types; sys.modules['nki'] = {placeholder}\n"
        "from vllm_neuron_cache.kernels.dialect import require_nki\n"
        "try: require_nki()\nexcept Exception as error: print(type(error).__name__, error)"
    )
    text = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert text.startswith('ConfigurationError kernel "nki" needs the Neuron SDK') and "nki" in text

"""Faults planted in the kernels' sources, each of which the checks must catch."""

import pytest
from kernel_checks import CHECKS, StandIn, stand_in_module
from nki_stand_in import StandInError

SKIP = "                oob_mode=nisa.oob_mode.skip,\n"
IDS = "nisa.dma_copy(dst=ids, src=row_ids[start : start + count, 0:1])"
SRC_IDS = "nisa.dma_copy(dst=src_ids, src=src_rows[start : start + count, 0:1])"
DST_IDS = "nisa.dma_copy(dst=dst_ids, src=dst_rows[start : start + count, 0:1])"
LOAD = "            nisa.dma_copy(dst=tile, src=rows[start : start + count, first : first + width])\n"
TILES = "for start in range(0, num_rows, PARTITIONS):"
TILE = "            tile = nl.ndarray((count, width), dtype=buffer.dtype, buffer=nl.sbuf)\n"
LISTS = f"{SRC_IDS}\n        dst_ids = nl.ndarray((count, 1), dtype=nl.int32, buffer=nl.sbuf)\n        {DST_IDS}"
COUNT = "count = min(PARTITIONS, num_rows - start)"


def swapped(text):
    return (
        text.replace("src=src_rows", "src=?").replace("src=dst_rows", "src=src_rows").replace("src=?", "src=dst_rows")
    )


FAULTS = [
    ("one tile left out", "block_scatter", TILES, "for start in range(PARTITIONS, num_rows, PARTITIONS):"),
    ("a tile too far apart", "gather_merge", TILES, "for start in range(0, num_rows, PARTITIONS + 1):"),
    ("the partial tile left out", "block_scatter", TILES, "for start in range(0, num_rows // 128 * 128, PARTITIONS):"),
    ("the partial tile left out", "gather_merge", TILES, "for start in range(0, num_rows // 128 * 128, PARTITIONS):"),
    ("the partial tile left out", "compact_blocks", TILES, "for start in range(0, num_rows - 127, PARTITIONS):"),
    ("a tile always full", "compact_blocks", COUNT, "count = PARTITIONS"),
    ("more than 128 partitions", "block_scatter", COUNT, "count = num_rows - start"),
    ("more than 128 partitions", "gather_merge", COUNT, "count = num_rows - start"),
    ("the first tile's indices in every tile", "block_scatter", IDS, IDS.replace("start : start + count", "0:count")),
    ("the first tile's sources", "gather_merge", SRC_IDS, SRC_IDS.replace("start : start + count", "0:count")),
    ("the first tile's destinations", "compact_blocks", DST_IDS, DST_IDS.replace("start : start + count", "0:count")),
    ("the first chunk's columns read again", "block_scatter", LOAD, LOAD.replace("first : first + width", "0:width")),
    ("the first chunk's columns written again", "block_scatter", "offset=first,", "offset=0,"),
    ("a chunk's offset one too far", "block_scatter", "offset=first,", "offset=first + 1,"),
    ("a chunk's offset without the level", "gather_merge", "offset=first_column + first,", "offset=first,"),
    ("the level's offset doubled", "gather_merge", "offset=first_column + first,", "offset=2 * first_column + first,"),
    ("a chunk's offset left out of the source", "gather_merge", "first_column + first,", "first_column,"),
    (
        "a chunk's offset left out of the target",
        "gather_merge",
        "offset=first, vector_offset",
        "offset=0, vector_offset",
    ),
    ("a chunk as wide as the row", "gather_merge", "width = min(chunk, hidden - first)", "width = hidden"),
    (
        "the last chunk left out",
        "compact_blocks",
        "range(0, fat_dim, chunk)",
        "range(0, fat_dim // chunk * chunk, chunk)",
    ),
    ("the last chunk as wide as the others", "compact_blocks", "min(chunk, fat_dim - first)", "chunk"),
    ("one tile per row of tiles, loaded once", "block_scatter", LOAD, "            if first == 0:\n    " + LOAD),
    ("a tile that nothing loads", "block_scatter", LOAD, ""),
    ("indices that nothing loads", "block_scatter", f"        {IDS}\n", ""),
    ("indices that nothing loads", "gather_merge", f"        {DST_IDS}\n", ""),
    ("the sentinel not skipped", "block_scatter", SKIP, ""),
    ("the sentinel not skipped", "gather_merge", SKIP, ""),
    ("the sentinel not skipped", "compact_blocks", SKIP, ""),
    ("destinations taken for sources", "gather_merge", "src=src_rows[start", "src=dst_rows[start"),
    ("sources and destinations swapped", "gather_merge", LISTS, swapped(LISTS)),
    ("sources and destinations swapped", "compact_blocks", LISTS, swapped(LISTS)),
    (
        "the chunk before written again",
        "block_scatter",
        TILE + LOAD,
        "            if first == 0:\n    " + TILE + "    " + LOAD,
    ),
    ("the same rows in both blocks", "compact_blocks", "src=dst_rows[start", "src=src_rows[start"),
    ("the coarse blocks read as the cache", "compact_blocks", "src=flat_coarse.ap(", "src=flat.ap("),
    ("indices along the wrong dimension", "block_scatter", "indirect_dim=0", "indirect_dim=1"),
    ("a row's stride of another tensor", "gather_merge", "pattern=[[hidden, count]", "pattern=[[fat_dim, count]"),
    ("ids as a row and not a column", "block_scatter", "nl.ndarray((count, 1)", "nl.ndarray((1, count)"),
    ("ids of 64 bits", "block_scatter", "dtype=nl.int32", "dtype=nl.int64"),
    ("a tile of another dtype", "compact_blocks", "dtype=buffer.dtype", "dtype=nl.float32"),
    (
        "scattered straight from HBM",
        "block_scatter",
        "src=tile,",
        "src=rows[start : start + count, first : first + width],",
    ),
    ("nothing returned", "gather_merge", "    return target\n", ""),
    ("another tensor returned", "compact_blocks", "    return buffer\n", "    return coarse\n"),
    ("the scratch block's ids kept", "block_scatter", "row_ids[block_ids == scratch_block] = SENTINEL", "pass"),
    ("the dummy row kept", "gather_merge", "np.where(dst_rows == dummy_row, np.int32(SENTINEL), dst_rows)", "dst_rows"),
    ("the levels one column apart", "gather_merge", "level * width for", "level * (width + 1) for"),
    (
        "ids of 64 bits to the device",
        "compact_blocks",
        "column(np.pad(src, padding))",
        "np.pad(src, padding)[:, None].astype(np.int64)",
    ),
    ("padding that writes row 0", "compact_blocks", "constant_values=SENTINEL", "constant_values=0"),
    (
        "coarse blocks as small as the cache's",
        "compact_blocks",
        "coarse_tokens, coarse.block_size",
        "coarse_tokens, buffer.block_size",
    ),
]
for name, target in (("block_scatter", "flat"), ("gather_merge", "target"), ("compact_blocks", "flat")):
    store = f"(\n                dst={target}.ap("
    FAULTS.append(("the store left out", name, f"nisa.dma_copy{store}", f"dict{store}"))


@pytest.mark.parametrize(("fault", "name", "old", "new"), FAULTS)
def test_a_planted_fault_is_caught(fault, name, old, new):
    module = stand_in_module(name, old, new)
    check, cases = CHECKS[name]
    with pytest.raises((AssertionError, StandInError)):
        for case in cases:
            check(module, case, StandIn().run)


def test_the_faults_are_planted_in_kernels_that_pass():
    for name, (check, cases) in CHECKS.items():
        for case in cases:
            check(stand_in_module(name), case, StandIn().run)

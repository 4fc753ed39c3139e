"""Which segments share an attention block, and which graph launches encode them.

A static vision or audio encoder takes a fixed number of attention blocks of a fixed number of positions (patches, or
audio frames). Attention stays within a block and, by segment-id masks, within a segment: an image, a temporal frame of
a video, a chunk of audio. So a segment lies wholly in one block, and several may share one. Whatever a launch computes
that no segment fills is padding.

The same arguments give the same plan in every process: tensor-parallel ranks pack for themselves and must agree.
"""

import bisect
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import NamedTuple


class Bucket(NamedTuple):
    """The static shape of one encoder graph."""

    positions: int
    """Positions in each attention block."""
    num_blocks: int
    """Attention blocks in one launch."""


class Ladder(NamedTuple):
    """The shapes that the encoder is compiled for, and what a block of them costs."""

    buckets: tuple[Bucket, ...]
    """In any order: any number of distinct `positions`, each with one or more `num_blocks`."""
    max_segments: int = 32
    """Segments that may share a block; 1 where none may."""
    attention_cost: float = 0.0
    """A block of p positions costs `p * (1 + attention_cost * p)`."""

    @property
    def block_positions(self) -> tuple[int, ...]:
        """The distinct sizes of a block, ascending."""
        return tuple(sorted({bucket.positions for bucket in self.buckets}))

    @property
    def largest_segment(self) -> int:
        """Positions of the largest segment that can be packed."""
        return max(bucket.positions for bucket in self.buckets)


class Placement(NamedTuple):
    """Where one segment lies within its launch."""

    item: int
    """Which of the packed items."""
    segment: int
    """Which of the item's segments."""
    block: int
    """Block within the launch."""
    first: int
    """First position within the block."""
    length: int
    """Positions."""


class Launch(NamedTuple):
    """One run of an encoder graph. Blocks after the last that a placement names are padding."""

    bucket: Bucket
    placements: tuple[Placement, ...]
    """Ordered by (block, first). In each block they follow one another from position 0 on: padding is a tail."""


def pack(items: Sequence[Sequence[int]], ladder: Ladder) -> list[Launch]:
    """Packs every segment of `items`, each a sequence of lengths in positions, into launches of the ladder's graphs.

    Segments are placed first fit decreasing. How large a block to open is a choice that no rule of thumb makes well: a
    large one wastes a smaller part of itself, but attention over it costs more and the last one may stay empty. So each
    size of the ladder is tried for all, and the cheapest plan is kept; of equally cheap ones that of the fewest blocks.

    The largest blocks come first, and among those of one size the largest launches. An item without segments is placed
    nowhere.

    Raises `ValueError` for a segment that is larger than the largest block or has no position, and for a ladder that
    has no bucket, or one of no size.
    """
    _check_ladder(ladder)
    segments = _descending_segments(items, ladder)
    if not segments:
        return []
    rungs = _num_blocks_by_positions(ladder)
    return list(_launches(_cheapest_blocks(segments, rungs, ladder), rungs))


def padding_ratio(launches: Iterable[Launch]) -> float:
    """Positions that the launches compute over positions that are live: 1.0 is no padding, as is no launch at all."""
    computed = live = 0
    for bucket, placements in launches:
        computed += bucket.positions * bucket.num_blocks
        live += sum(placement.length for placement in placements)
    return computed / live if live else 1.0


class _Segment(NamedTuple):
    length: int
    item: int
    segment: int


class _Block(NamedTuple):
    positions: int
    segments: list[_Segment]

    @property
    def num_live(self) -> int:
        return sum(segment.length for segment in self.segments)


_Rungs = dict[int, tuple[int, ...]]
"""For each size of a block, ascending: the numbers of blocks in a launch, descending."""


def _check_ladder(ladder: Ladder) -> None:
    if not ladder.buckets or min(map(min, ladder.buckets)) < 1 or ladder.max_segments < 1 or ladder.attention_cost < 0:
        raise ValueError(
            f"{ladder} needs a bucket, 1 or more positions and blocks in each, 1 or more segments in a block and no "
            "negative cost"
        )


def _descending_segments(items: Sequence[Sequence[int]], ladder: Ladder) -> list[_Segment]:
    """All segments, the largest first, equal ones in the order of the items."""
    largest = ladder.largest_segment
    segments: list[_Segment] = []
    for item, lengths in enumerate(items):
        for segment, length in enumerate(lengths):
            if not 1 <= length <= largest:
                raise ValueError(
                    f"segment {segment} of item {item} has {length} positions; a segment lies in one attention block "
                    f"and has 1 to {largest} (blocks have {', '.join(map(str, ladder.block_positions))})"
                )
            segments.append(_Segment(length, item, segment))
    segments.sort(key=lambda segment: -segment.length)  # a stable sort
    return segments


def _num_blocks_by_positions(ladder: Ladder) -> _Rungs:
    return {
        positions: tuple(sorted({b.num_blocks for b in ladder.buckets if b.positions == positions}, reverse=True))
        for positions in ladder.block_positions
    }


def _cheapest_blocks(segments: list[_Segment], rungs: _Rungs, ladder: Ladder) -> list[_Block]:
    plans = _plans(segments, tuple(rungs), ladder.max_segments)
    return min(plans, key=lambda blocks: (_cost(blocks, rungs, ladder.attention_cost), len(blocks)))


def _plans(segments: list[_Segment], sizes: tuple[int, ...], max_segments: int) -> Iterator[list[_Block]]:
    """The plans to choose from, those of larger blocks first. `sizes` ascend.

    Each comes with its blocks shrunk to what they hold, then as they were opened: where launches have several blocks,
    one block shrunk alone can cost a launch of its own that is mostly padding.
    """
    # Below the size that holds the smallest segment, every size opens the same blocks.
    for size in reversed(sizes[bisect.bisect_left(sizes, segments[-1].length) :]):
        blocks = _first_fit(segments, size, sizes, max_segments)
        yield [_Block(_size_for(block.num_live, sizes), block.segments) for block in blocks]
        yield blocks


def _size_for(length: int, sizes: tuple[int, ...]) -> int:
    return sizes[bisect.bisect_left(sizes, length)]


def _first_fit(segments: list[_Segment], size: int, sizes: tuple[int, ...], max_segments: int) -> list[_Block]:
    """Puts each segment in the first block with room for it. Blocks are opened at `size`, or larger if need be."""
    blocks: list[_Block] = []
    rooms = _Rooms(len(segments))
    for segment in segments:
        index = rooms.first_of(segment.length)
        if index is None:
            index = len(blocks)
            blocks.append(_Block(max(size, _size_for(segment.length, sizes)), []))
            room = blocks[index].positions
        else:
            room = rooms.room(index)
        placed = blocks[index].segments
        placed.append(segment)
        rooms.set(index, room - segment.length if len(placed) < max_segments else 0)
    return blocks


class _Rooms:
    """Free positions of each block, as a tree of maxima, so that a first fit among n blocks takes log n steps.

    With a list, many small images that each open a block of their own would take n * n.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_leaves = 1 << (num_blocks - 1).bit_length()
        self._most = [0] * (2 * self._num_leaves)  # a node's children are 2 * node and 2 * node + 1; the root is 1

    def room(self, block: int) -> int:
        return self._most[self._num_leaves + block]

    def first_of(self, length: int) -> int | None:
        """The first block with room for `length` positions, None if there is none."""
        most = self._most
        if most[1] < length:
            return None
        node = 1
        while node < self._num_leaves:
            node *= 2
            if most[node] < length:
                node += 1
        return node - self._num_leaves

    def set(self, block: int, room: int) -> None:
        most, node = self._most, self._num_leaves + block
        most[node] = room
        while node > 1:
            left, right = most[node & ~1], most[node | 1]
            node //= 2
            larger = left if left > right else right
            if most[node] == larger:  # so are the maxima above it
                return
            most[node] = larger


def _cost(blocks: list[_Block], rungs: _Rungs, attention_cost: float) -> float:
    """Cost of the launches that run these blocks, padding blocks included."""
    counts = Counter(block.positions for block in blocks)
    # The terms of a float sum in one order always, for equal plans to cost the same.
    return sum(
        _covers(rungs[positions], count)[count].num_blocks * positions * (1 + attention_cost * positions)
        for positions, count in sorted(counts.items())
    )


class _Cover(NamedTuple):
    """The launches that run a number of blocks."""

    num_blocks: int
    """Blocks that the launches compute."""
    num_launches: int
    rung: int
    """Blocks in one of the launches. The others are the cover of what it leaves."""


def _covers(rungs: tuple[int, ...], num_blocks: int) -> Sequence[_Cover]:
    """The covers of each number of blocks, up to `num_blocks` at least."""
    return _cover_table(rungs, 1 << num_blocks.bit_length())


@lru_cache(maxsize=256)
def _cover_table(rungs: tuple[int, ...], length: int) -> tuple[_Cover, ...]:
    """For 0 to `length - 1` blocks: the launches that compute the fewest blocks, of those the fewest launches.

    Filling the largest launches first is not always that: 6 blocks are 2 launches of 3, not one of 4 and one of 3.
    """
    covers = [_Cover(0, 0, 0)]
    for num_blocks in range(1, length):
        rests = [covers[max(num_blocks - rung, 0)] for rung in rungs]
        ways = [_Cover(rest.num_blocks + rung, rest.num_launches + 1, rung) for rung, rest in zip(rungs, rests)]
        covers.append(min(ways, key=lambda cover: cover[:2]))  # `rungs` descend: of equals, that of the largest
    return tuple(covers)


def _split(num_blocks: int, rungs: tuple[int, ...]) -> list[int]:
    """Blocks in each of the launches that run `num_blocks`, descending. Only the last has padding blocks: were they as
    many as its own, the others would be a cheaper cover."""
    covers = _covers(rungs, num_blocks)
    parts: list[int] = []
    while num_blocks > 0:
        parts.append(covers[num_blocks].rung)
        num_blocks -= parts[-1]
    return sorted(parts, reverse=True)


def _launches(blocks: list[_Block], rungs: _Rungs) -> Iterator[Launch]:
    for positions in reversed(rungs):
        group = [block for block in blocks if block.positions == positions]
        waiting = iter(group)
        for num_blocks in _split(len(group), rungs[positions]):
            yield Launch(Bucket(positions, num_blocks), tuple(_placements(islice(waiting, num_blocks))))


def _placements(blocks: Iterable[_Block]) -> Iterator[Placement]:
    for index, block in enumerate(blocks):
        first = 0
        for length, item, segment in block.segments:
            yield Placement(item, segment, index, first, length)
            first += length

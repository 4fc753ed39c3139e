"""A reference that predicts encoder runs: least-recently-used eviction in whole blocks, one request at a time.

It shares no code with the cache it checks: sizes come from the token ids of the prompts that an engine reports.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple


class ReferenceItem(NamedTuple):
    """One item of a request: its name, and the lengths of its runs of placeholder tokens (frames, for a video)."""

    name: str
    runs: tuple[int, ...]


def placeholder_items(
    names: Sequence[str], prompt_token_ids: Sequence[int], *, image_token: int, video_token: int
) -> list[ReferenceItem]:
    """Matches the items of a prompt with the runs of placeholder tokens in it.

    An image is one run. All runs of the video token belong to one clip, which comes last.
    """
    images: list[int] = []
    frames: list[int] = []
    previous = None
    for token in prompt_token_ids:
        for placeholder, runs in ((image_token, images), (video_token, frames)):
            if token == placeholder:
                if previous == placeholder:
                    runs[-1] += 1
                else:
                    runs.append(1)
        previous = token
    found = [(run,) for run in images] + ([tuple(frames)] if frames else [])
    if len(found) != len(names):
        raise ValueError(f"the prompt has {len(found)} items and {len(names)} names: {list(names)}")
    return [ReferenceItem(name, runs) for name, runs in zip(names, found)]


def num_reference_blocks(runs: Sequence[int], block_size: int) -> int:
    """Blocks of an item: whole runs in a block, a run that is longer than a block over several."""
    if len(runs) == 1 or max(runs) > block_size:
        return -(-sum(runs) // block_size)
    blocks, room = 0, 0
    for run in runs:
        if run > room:
            blocks, room = blocks + 1, block_size
        room -= run
    return blocks


def reference_encoder_runs(
    requests: Sequence[Sequence[ReferenceItem]], *, num_blocks: int, block_size: int
) -> list[int]:
    """Encoder runs that each request costs, with `num_blocks` blocks for items."""
    cached: OrderedDict[str, int] = OrderedDict()
    runs_of_request = []
    for items in requests:
        encoded = 0
        in_use: list[str] = []
        for item in items:
            blocks = num_reference_blocks(item.runs, block_size)
            if item.name not in cached:
                encoded += 1
                while sum(cached.values()) + blocks > num_blocks:
                    oldest = next(name for name in cached if name not in in_use)
                    del cached[oldest]
                cached[item.name] = blocks
            in_use.append(item.name)
        for name in in_use:
            cached.move_to_end(name)
        runs_of_request.append(encoded)
    return runs_of_request

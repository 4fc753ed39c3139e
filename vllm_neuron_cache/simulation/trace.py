"""Requests with media, as a list that is played: by the simulator, the planner and the benchmarks."""

import random
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple


class TraceItem(NamedTuple):
    """One image, video or audio clip of a request. Items of the same key are the same."""

    key: str
    num_tokens: int
    """Token rows of its encoder output."""
    modality: str = "image"
    frame_tokens: tuple[int, ...] = ()
    """Rows of each frame of a video that lies by frames, else empty. They sum up to `num_tokens`."""


class TraceRequest(NamedTuple):
    """One request: text, an item, text, an item, ..., text."""

    request_id: str
    arrival: int
    """Pass of the scheduler before which it arrives; a request is never earlier than the one before it."""
    items: tuple[TraceItem, ...]
    text_tokens: tuple[int, ...]
    """Text tokens before each item, and after the last: one more than there are items, each at least 1."""
    max_tokens: int = 1
    """Tokens that it generates."""
    shared_prefix: int = 0
    """How many of its first items, with the text before them, are those of every request with the same items there:
    vLLM's prefix cache may find them."""

    @property
    def num_prompt_tokens(self) -> int:
        separators = sum(max(len(item.frame_tokens) - 1, 0) for item in self.items)
        return sum(self.text_tokens) + sum(item.num_tokens for item in self.items) + separators


def repeating_items(
    num_tokens: Sequence[int], count: int, *, reuse: float, zipf: float = 1.0, seed: int = 0, modality: str = "image"
) -> list[TraceItem]:
    """`count` items of which a share `reuse` was there before.

    A new item's size is drawn from `num_tokens`. A repeated one is drawn by how recently it was asked for: the item of
    rank `k` with a probability proportional to `k ** -zipf`, rank 1 being the one asked for last. (The independent
    stack-distance model; V. Almeida et al., "Characterizing Reference Locality in the WWW", 1996, found such distances
    in the requests of web servers.) The same arguments give the same items.
    """
    choose = random.Random(seed)
    recent: list[TraceItem] = []  # the one asked for last comes last
    weights: list[float] = []
    items: list[TraceItem] = []
    num_new = 0
    for _ in range(count):
        if recent and choose.random() < reuse:
            rank = choose.choices(range(len(recent)), cum_weights=weights)[0]
            item = recent.pop(len(recent) - 1 - rank)
        else:
            num_new += 1
            item = TraceItem(f"{modality}-{num_new}", choose.choice(num_tokens), modality)
            weights.append((weights[-1] if weights else 0.0) + num_new**-zipf)
        recent.append(item)
        items.append(item)
    return items


def one_item_requests(items: Sequence[TraceItem], *, per_pass: int = 1, max_tokens: int = 1) -> list[TraceRequest]:
    """A request for each item, `per_pass` of them arriving before each pass, with a little text around the item."""
    return [
        TraceRequest(f"request-{index}", index // per_pass, (item,), (4, 8), max_tokens)
        for index, item in enumerate(items)
    ]


def random_requests(
    items: Sequence[TraceItem], *, num_requests: int, max_items: int, seed: int, every: int = 2, max_tokens: int = 6
) -> list[TraceRequest]:
    """Requests of none to `max_items` of the `items` in any order, repeats within a prompt included, with text of
    random lengths around them, arriving at random about `every` passes."""
    choose = random.Random(seed)
    arrivals = accumulate(choose.randint(0, 2 * every) for _ in range(num_requests))
    requests = []
    for index, arrival in enumerate(arrivals):
        chosen = tuple(choose.choices(items, k=choose.randint(0, max_items))) if items else ()
        text = tuple(choose.randint(1, 12) for _ in range(len(chosen) + 1))
        shared = choose.randint(0, len(chosen)) if choose.random() < 0.5 else 0
        requests.append(TraceRequest(f"request-{index}", arrival, chosen, text, choose.randint(1, max_tokens), shared))
    return requests

"""The fault matrix: what is done to a request, when, and what becomes of it. `docs/faults.md` shows the same table."""

from typing import NamedTuple

from faults import ENCODER_FAULTS, ENTRY_FAULTS, POSITION_FAULTS

PHASES = {
    "first": "as its first row is read, in the step that encodes it",
    "chunk": "as a later chunk of it is read",
    "hit": "as it is read by a request that found it in the cache",
    "decode": "after its last row was read",
    "queued": "while the request waits",
    "prompt": "between two chunks of the prompt",
    "tokens": "after the first token",
}

SERVED = "same tokens"
ABORTED = "aborted"
ENCODER = "EncoderOutputError"
READ = "EncoderCacheReadError"

MODES = ("in process", "asynchronous", "separate process", "HTTP")


class Cell(NamedTuple):
    """What is done to the second of four requests. The other three always get their tokens."""

    fault: str
    phase: str
    expected: str


FAULTS = [
    *(Cell(fault, "first", ENCODER) for fault in ENCODER_FAULTS),
    *(Cell(fault, phase, READ) for fault in ENTRY_FAULTS + POSITION_FAULTS for phase in ("first", "chunk", "hit")),
    *(Cell(fault, "decode", SERVED) for fault in ENTRY_FAULTS),
]
"""Planted in the worker, so that every mode can have them."""

EVENTS = [
    Cell(event, phase, ABORTED if event == "abort" else SERVED)
    for event in (
        "abort",
        "reset_encoder_cache",
        "reset_prefix_cache",
        "reset_prefix_cache, running too",
        "reload_weights",
        "sleep, wake_up",
    )
    for phase in ("queued", "prompt", "tokens")
]
"""Calls from outside, between two steps."""


def table(title: str, cells: list[Cell], results: dict[tuple[str, str], str]) -> str:
    """A Markdown table: faults down, phases across."""
    phases = [phase for phase in PHASES if any(cell.phase == phase for cell in cells)]
    lines = [f"| {title} | {' | '.join(phases)} |", "|---" * (1 + len(phases)) + "|"]
    for fault in dict.fromkeys(cell.fault for cell in cells):
        lines.append(f"| {fault} | {' | '.join(results.get((fault, phase), '-') for phase in phases)} |")
    return "\n".join(lines)


def expected_tables() -> list[str]:
    return [
        table("planted in the worker", FAULTS, {(cell.fault, cell.phase): cell.expected for cell in FAULTS}),
        table("called from outside", EVENTS, {(cell.fault, cell.phase): cell.expected for cell in EVENTS}),
    ]

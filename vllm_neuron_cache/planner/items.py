"""The media that a deployment expects: sizes of images, videos and clips, and how often each comes."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_neuron_cache.errors import PlannerError

_SIZE = re.compile(r"(\d+)[xX](\d+)(?:[xX](\d+))?|(\d+(?:\.\d+)?)s")
_FORMS = "WIDTHxHEIGHT for an image, WIDTHxHEIGHTxFRAMES for a video, SECONDSs for a clip of audio"


@dataclass(frozen=True, kw_only=True)
class MediaSize:
    """One size of media, and its share of the requests."""

    width: int = 0
    """Pixels; 0 for audio."""
    height: int = 0
    frames: int | None = None
    """Sampled frames of a video, None for an image."""
    seconds: float | None = None
    """Seconds of a clip of audio."""
    count: int = 1
    """How many requests have an item of this size, against those of the other sizes."""

    @property
    def modality(self) -> str:
        if self.seconds is not None:
            return "audio"
        return "image" if self.frames is None else "video"

    @property
    def label(self) -> str:
        if self.seconds is not None:
            return f"{self.seconds:g}s"
        return f"{self.width}x{self.height}" + ("" if self.frames is None else f"x{self.frames}")


DEFAULT_SIZES = (
    MediaSize(width=256, height=256),
    MediaSize(width=512, height=512),
    MediaSize(width=1024, height=1024),
    MediaSize(width=1920, height=1080),
)
"""What is planned for when nobody says which media come: a thumbnail to a full screen, equally often."""


def parse_size(text: str, where: str, count: int = 1) -> MediaSize:
    """`512x512`, `512x512x30` or `12.5s` as a `MediaSize`. Raises `PlannerError` that names `where`."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise PlannerError(f"{where}: {text.strip()!r} is not a size. Give {_FORMS}.")
    width, height, frames, seconds = match.groups()
    if seconds is not None:
        return MediaSize(seconds=float(seconds), count=count)
    return MediaSize(width=int(width), height=int(height), frames=None if frames is None else int(frames), count=count)


def parse_sizes(text: str) -> tuple[MediaSize, ...]:
    """Sizes between commas, as `--sizes` takes them. Raises `PlannerError` for none, or for what is not a size."""
    parts = [part for part in text.split(",") if part.strip()]
    if not parts:
        raise PlannerError(f"--sizes names no size. Give {_FORMS}, with commas between.")
    return tuple(parse_size(part, "--sizes") for part in parts)


def read_sizes_file(file: Path) -> tuple[MediaSize, ...]:
    """Sizes with counts: one `SIZE [COUNT]` a line with `#` comments, or a JSON list of sizes and [size, count] pairs.

    Raises `PlannerError` that names the file and the line (of a JSON list, the number of the entry).
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise PlannerError(f"cannot read the sizes in {file}: {reason}.") from error
    sizes = _from_json(file, text) if text.lstrip().startswith(("[", "{")) else _from_lines(file, text)
    if not sizes:
        raise PlannerError(f"{file} names no size. Give one `SIZE [COUNT]` a line: {_FORMS}.")
    return sizes


def _from_lines(file: Path, text: str) -> tuple[MediaSize, ...]:
    sizes = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split("#")[0].split()
        if len(words) > 2:
            raise PlannerError(f"{file}, line {number}: give one size and, after a space, how often it comes.")
        if words:
            where = f"{file}, line {number}"
            sizes.append(parse_size(words[0], where, _count(words[1], where) if len(words) == 2 else 1))
    return tuple(sizes)


def _from_json(file: Path, text: str) -> tuple[MediaSize, ...]:
    try:
        entries = json.loads(text)
    except ValueError as error:
        raise PlannerError(f"{file} begins as JSON and is not: {error}.") from error
    if not isinstance(entries, list):
        raise PlannerError(f'{file} holds no list. Give one such as ["512x512", ["1024x768", 3]].')
    sizes = []
    for number, entry in enumerate(entries, start=1):
        where = f"{file}, entry {number}"
        size, count = entry if isinstance(entry, list) and len(entry) == 2 else (entry, 1)
        if not isinstance(size, str):
            raise PlannerError(f'{where}: {entry!r} is neither a size such as "512x512" nor a pair of size and count.')
        sizes.append(parse_size(size, where, _count(count, where)))
    return tuple(sizes)


def _count(value: Any, where: str) -> int:
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PlannerError(f"{where}: the count is {value!r}, and has to be a whole number of at least 1.")
    return value

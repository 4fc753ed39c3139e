"""The language model's forward with the merge inside it: embed tokens, take cached rows, add deepstack levels.

One function over callables serves two callers: a serving engine's own compiled forward, with the engine's layers, and
the static graphs of `graphs.decoder`, with plain ones. The merge is in the form of a gather: `src_rows` names for
every token row of the step the row of the buffer that it takes, so that sizes depend on the step's length and nothing
else. There is no dummy row, no padding of pairs, and no ladder in the number of rows.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

TEXT_ROW = -1
"""What `src_rows` has for a token row that takes nothing: text, padding."""


class Decoder(NamedTuple):
    """A language model in parts."""

    embed_tokens: Callable[[torch.Tensor], torch.Tensor]
    """Of int `[T]`: `[T, H]`."""
    layers: Iterable[Callable[[Any, torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]]
    """Each of `positions`, `hidden [T, H]` and `residual [T, H]` (None for the first): the two that follow. What a
    layer has computed is `hidden`, and the next one adds it to `residual`."""
    norm: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    """The last norm, of `hidden` and `residual`; its first result is the model's."""


def prefill(
    decoder: Decoder,
    input_ids: torch.Tensor,
    positions: Any,
    src_rows: torch.Tensor | None = None,
    buffer_rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Hidden states `[T, H]` of a step. Mutates nothing but what the decoder's layers do.

    Without `src_rows` it is the plain decoder, with neither a gather nor a choice in its graph: steps of text, decode.

    Args:
        decoder: the language model.
        input_ids: int `[T]`; ids of the vocabulary, placeholders too.
        positions: what the layers take for positions.
        src_rows: int32 `[T]`, rows of the flattened buffer, `TEXT_ROW` where the token's own embedding stays.
        buffer_rows: `[num_blocks * block_size, H * (1 + levels)]`, the flattened buffer. Its level 0 replaces
            embeddings; level i is added to what layer i (from 1) has computed.
    """
    hidden, residual = decoder.embed_tokens(input_ids), None
    cached = None if src_rows is None else _CachedRows(buffer_rows, src_rows, hidden.shape[1])
    if cached is not None:
        hidden = torch.where(cached.present, cached.level(0), hidden)
    for number, layer in enumerate(decoder.layers, start=1):
        hidden, residual = layer(positions, hidden, residual)
        if cached is not None and number <= cached.num_levels:
            # Chosen and not multiplied: whatever is in the row that text names is never computed with.
            hidden = torch.where(cached.present, hidden + cached.level(number), hidden)
    return decoder.norm(hidden, residual)[0]


class _CachedRows:
    """What a step takes from the buffer, level by level: each gather reads one level's columns of the step's rows, and
    a compiler joins it with the operation that needs it."""

    def __init__(self, buffer_rows: torch.Tensor, src_rows: torch.Tensor, width: int) -> None:
        self._buffer_rows = buffer_rows
        self._width = width
        self.num_levels = buffer_rows.shape[1] // width - 1
        self.present = (src_rows >= 0).unsqueeze(1)
        # In range whatever the numbers are; for those of a plan it only makes text read the first row.
        self._rows = src_rows.clamp(0, buffer_rows.shape[0] - 1)

    def level(self, level: int) -> torch.Tensor:
        """`[T, H]`; rows of text hold something."""
        columns = self._buffer_rows[:, level * self._width : (level + 1) * self._width]
        return columns.index_select(0, self._rows)

"""What the encoders' attention has in common."""

import torch
import torch.nn.functional as F

SMALLEST_BLOCK = 256
"""Positions in the smallest attention block worth a graph of its own."""


def segment_mask(segment_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What is added to the scores so that positions attend within their segment: `[n, 1, P, P]`, 0 or minus infinity.

    Padding is a segment as well, or its rows would have nothing to attend to and become NaN.
    """
    same = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
    zero = torch.zeros((), dtype=dtype, device=segment_ids.device)
    return torch.where(same, zero, torch.full_like(zero, float("-inf")))


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`[n, P, heads, head_dim]` each, to `[n, P, heads * head_dim]`."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=q.shape[-1] ** -0.5)
    return out.transpose(1, 2).flatten(2)


def halving_blocks(largest: int, multiple: int) -> tuple[int, ...]:
    """Sizes of attention blocks, ascending: the largest, three quarters of it, a half and so on.

    A segment wastes at most a third of the block that it gets, and two sizes for each halving are few graphs. Each is
    a multiple of `multiple`; none but the largest is below `SMALLEST_BLOCK`.
    """
    sizes = {largest}
    size = largest
    while size // 2 >= SMALLEST_BLOCK:
        sizes |= {size * 3 // 4, size // 2}
        size //= 2
    return tuple(sorted(size for size in sizes if size % multiple == 0))

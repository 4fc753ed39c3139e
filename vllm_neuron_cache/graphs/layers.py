"""Pieces of layers that several graphs have in common."""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x` over its root mean square in float32, over its last dimension; of the dtype of `x`."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weight


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of whole heads, whose halves are the two coordinates.

    `x` `[positions, ..., head_dim]`, where the positions may take several dimensions; `cos` and `sin` `[positions,
    head_dim / 2]`.
    """
    shape = (*cos.shape[:-1], *(1,) * (x.ndim - cos.ndim), cos.shape[-1])
    cos, sin = cos.view(shape), sin.view(shape)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

"""Ranks that encode together."""

from functools import partial

import torch

from vllm_neuron_cache.encoders.static_encoder import ONE_RANK, EncoderRanks


def gathering_ranks(count: int, rank: int, group_name: str) -> EncoderRanks:
    """Ranks of a process group of torch.distributed, by its name. One rank alone has nothing to gather."""
    if count == 1:
        return ONE_RANK
    return EncoderRanks(count, rank, partial(_all_gather, count=count, group_name=group_name))


def _all_gather(rows: torch.Tensor, *, count: int, group_name: str) -> torch.Tensor:
    # The functional form: a collective that is an operator of the graph.
    gathered = torch.ops._c10d_functional.all_gather_into_tensor(rows.contiguous(), count, group_name)
    return torch.ops._c10d_functional.wait_tensor(gathered)

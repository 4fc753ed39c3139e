"""The comparison with stock vLLM can fail: damaged rows change tokens."""

import pytest
import torch
from engines import mixed_requests, serve, small_media, start

pytestmark = pytest.mark.vllm


def zeroed_deepstack(output: torch.Tensor, hidden_size: int) -> torch.Tensor:
    damaged = output.clone()
    damaged[:, hidden_size:] = 0
    return damaged


def two_rows_swapped(output: torch.Tensor, hidden_size: int) -> torch.Tensor:
    damaged = output.clone()
    damaged[[0, -1]] = damaged[[-1, 0]]
    return damaged


@pytest.fixture(scope="module")
def expected(checkpoint):
    stock = start(checkpoint, None)
    tokens = serve(stock, mixed_requests(), small_media())
    stock.close()
    return tokens


@pytest.mark.parametrize("damage", [zeroed_deepstack, two_rows_swapped])
def test_damaged_rows_change_tokens(checkpoint, expected, damage):
    ours = start(checkpoint, {"lane": "eager"})
    runtime = ours.runner.encoder_runtime
    write = runtime.write
    hidden_size = ours.runner.inputs_embeds_size
    runtime.write = lambda key, output: write(key, damage(output, hidden_size))
    tokens = serve(ours, mixed_requests(), small_media())
    ours.close()
    assert tokens != expected


def test_undamaged_rows_do_not(checkpoint, expected):
    ours = start(checkpoint, {"lane": "eager"})
    tokens = serve(ours, mixed_requests(), small_media())
    ours.close()
    assert tokens == expected

"""The comparison with stock vLLM can fail: damaged rows change tokens."""

import pytest
import torch
from engines import mixed_requests, serve, small_media, start, stock_tokens

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
    return stock_tokens(checkpoint)


# Depends on `expected`, because an engine that is closed takes vLLM's process groups of all with it.
@pytest.fixture(scope="module")
def engine(checkpoint, expected):
    engine = start(checkpoint, {"lane": "eager"})
    yield engine
    engine.close()


def tokens_of_fresh(engine) -> list[tuple[int, ...]]:
    engine.llm.reset_prefix_cache()
    engine.llm.llm_engine.reset_encoder_cache()
    return serve(engine, mixed_requests(), small_media())


@pytest.mark.parametrize("damage", [zeroed_deepstack, two_rows_swapped])
def test_damaged_rows_change_tokens(engine, expected, damage, monkeypatch):
    runtime = engine.runner.encoder_runtime
    write, hidden_size = runtime.write, engine.runner.inputs_embeds_size
    monkeypatch.setattr(runtime, "write", lambda key, output: write(key, damage(output, hidden_size)))
    assert tokens_of_fresh(engine) != expected


def test_undamaged_rows_do_not(engine, expected):
    assert tokens_of_fresh(engine) == expected

"""Both encoders of Qwen2.5-Omni's thinker as static graphs in real engines: tokens are those of stock vLLM."""

from typing import Any

import pytest
import torch
from engines import start
from test_audio import ARGUMENTS, PROMPTS, SPOKEN, TOKENS, answers, forget

pytestmark = pytest.mark.vllm

REQUESTS = {
    name: (PROMPTS | SPOKEN)[name]
    for name in (
        "sound",
        "sound again",
        "two sounds",
        "one sound twice",
        "picture and sound",
        "all three",
        "text",
        "picture and spoken clip",
    )
}
# A sound or a picture is another item beside a spoken clip, whose processor option it gets.
NUM_ITEMS = 5 + 3


def compiled(checkpoint: Any) -> Any:
    cache = {"lane": "eager", "compiled_encoder": True}
    return start(checkpoint, cache, encoder={"encoder_attention_block_size": 1296}, **ARGUMENTS)


@pytest.fixture(scope="module")
def stock(omni_checkpoint):
    """Tokens of stock vLLM, by name of the request."""
    engine = start(omni_checkpoint, None, **ARGUMENTS)
    expected = answers(engine, REQUESTS)
    engine.close()
    assert len(set(expected.values())) == len(expected)
    return expected


def test_tokens_are_those_of_stock(omni_checkpoint, stock, monkeypatch):
    engine = compiled(omni_checkpoint)
    runs = []
    for tower in (engine.runner.model.visual, engine.runner.model.audio_tower):
        tower.register_forward_hook(lambda tower, *args: runs.append(tower))
    together = engine.generate(list(REQUESTS.values()), max_tokens=TOKENS)
    assert [completion.token_ids for completion in together] == list(stock.values())
    assert engine.encoder_runs == NUM_ITEMS
    (stats,) = engine.llm.collective_rpc("encoder_cache_stats")
    assert stats["items_written"] == NUM_ITEMS
    assert stats["encoder_launches"] > 0 and stats["recompiles_after_warmup"] == 0
    assert not runs, "one of the model's own encoders ran"
    engine.manager.check_integrity([engine.worker.check_encoder_cache_integrity()])

    # What the graphs make is what the model hears and sees.
    for encoder, name in zip(engine.runner.encoder_runtime._encoders, ("sound", "picture and sound")):
        forget(engine)
        forward = encoder.adapter.forward
        monkeypatch.setattr(encoder.adapter, "forward", lambda *args, forward=forward: torch.roll(forward(*args), 1, 1))
        assert answers(engine, {name: REQUESTS[name]}) != {name: stock[name]}
        monkeypatch.undo()
    engine.close()

"""With `compiled_prefill` the merge is inside the model's own forward: tokens of stock vLLM, and no work for text."""

from typing import NamedTuple

import pytest
import torch
from engines import mixed_requests, serve, small_media, start, stock_tokens
from faults import FaultInjector
from services import Ask, EngineService
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_neuron_cache.demo.requests import MediaRequest, engine_prompt
from vllm_neuron_cache.errors import ConfigurationError

pytestmark = pytest.mark.vllm

PREFILL = {"lane": "eager", "compiled_prefill": True}
# Every photograph but one is cut, and the clip.
CHUNKED = {"max_num_batched_tokens": 256, "block_size": 32}
FAULTS = f"{FaultInjector.__module__}.{FaultInjector.__qualname__}"
ASTRONAUT_ROWS = 256
MEDIA_ROWS = 2694
"""Of all items in all of the mixed requests."""


class Stock(NamedTuple):
    """What stock vLLM makes of the requests."""

    tokens: list[tuple[int, ...]]
    hidden: torch.Tensor
    """Of `hidden_states`."""


def hidden_states(engine) -> torch.Tensor:
    """What the model's forward returns, step after step, for a prompt with an image and a clip and for its tokens."""
    runner, steps = engine.runner, []
    forward = runner._model_forward

    def recorded(*args, **kwargs):
        steps.append(forward(*args, **kwargs))
        return steps[-1]

    runner._model_forward = recorded
    try:
        request = MediaRequest(before="Both. ", images=("chelsea",), clip=True, after="What happens?")
        engine.generate([engine_prompt(request, small_media())], max_tokens=4)
    finally:
        del runner._model_forward
    return torch.cat(steps)


@pytest.fixture(scope="module")
def stock(checkpoint) -> Stock:
    engine = start(checkpoint, None, **CHUNKED)
    found = Stock(serve(engine, mixed_requests(), small_media()), hidden_states_of_fresh(engine))
    engine.close()
    assert len(set(found.tokens)) > len(mixed_requests()) / 2
    return found


def hidden_states_of_fresh(engine) -> torch.Tensor:
    engine.llm.reset_prefix_cache()
    return hidden_states(engine)


@pytest.fixture(scope="module")
def eager(checkpoint, stock):
    """One uncompiled engine for all tests that can share it. The last to start: one that ends takes vLLM's process
    groups with it."""
    engine = start(checkpoint, PREFILL, worker_extension_cls=FAULTS, **CHUNKED)
    yield EngineService(engine)
    engine.close()


@pytest.fixture(autouse=True)
def undisturbed(request):
    if "eager" not in request.fixturenames:
        yield
        return
    service = request.getfixturevalue("eager")
    service.fresh()
    yield
    service.fresh()
    service.rpc("check_encoder_cache_integrity")


class GathersFromBuffer(TorchDispatchMode):
    """Counts operators that read rows of the buffer."""

    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__()
        self._address = buffer.untyped_storage().data_ptr()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.index_select.default:
            self.count += args[0].untyped_storage().data_ptr() == self._address
        return func(*args, **(kwargs or {}))


def steps_of(runner, monkeypatch) -> list[bool]:
    """Whether each step from now on reads rows."""
    steps: list[bool] = []
    take = runner._source_rows.take

    def recorded(num_tokens):
        rows = take(num_tokens)
        steps.append(rows is not None)
        return rows

    monkeypatch.setattr(runner._source_rows, "take", recorded)
    return steps


def test_compiled_tokens_are_those_of_stock_and_nothing_compiles_after_start(checkpoint, monkeypatch):
    from torch._dynamo.utils import counters

    media, requests = small_media(), mixed_requests()
    # Compiled as well, and computed once for this test and those of identity.
    expected = stock_tokens(checkpoint, enforce_eager=False, enable_prefix_caching=False)
    # As many rows in the buffer as the longest step has tokens: to a compiler one size may look like the other.
    blocks = {"encoder_cache_block_size": 16, "encoder_cache_num_blocks_exact": 256}
    ours = start(checkpoint, PREFILL | blocks, enforce_eager=False)
    assert ours.runner.encoder_runtime.blocks.buffer.shape[:2].numel() == ours.runner.max_num_tokens
    steps = steps_of(ours.runner, monkeypatch)
    before = {kind: dict(counts) for kind, counts in counters.items()}
    tokens = serve(ours, requests, media)
    assert {kind: dict(counts) for kind, counts in counters.items()} == before
    assert 0 < sum(steps) < len(steps)
    ours.llm.collective_rpc("check_encoder_cache_integrity")
    ours.close()
    assert tokens == expected

    torch.compile(lambda tensor: tensor + 1, backend="eager")(torch.ones(2))
    assert {kind: dict(counts) for kind, counts in counters.items()} != before


def test_uncompiled_tokens_are_those_of_stock_in_chunks(eager, stock):
    engine = eager.engine
    before = engine.runner.encoder_runtime.stats()
    assert serve(engine, mixed_requests(), small_media()) == stock.tokens
    stats = engine.runner.encoder_runtime.stats()
    # Each request's rows once alone; then together, where the KV cache has some of them.
    assert MEDIA_ROWS <= stats.rows_read - before.rows_read <= 2 * MEDIA_ROWS
    assert not [graph for graph in engine.runner.encoder_runtime.graphs if graph.spec.name == "merge_rows"]


def test_hidden_states_are_those_of_stock(eager, stock):
    """Closer than tokens tell: those of the small model hardly see a row more or less."""
    torch.testing.assert_close(hidden_states_of_fresh(eager.engine), stock.hidden, rtol=1e-5, atol=1e-5)


def test_a_step_of_text_gathers_nothing_and_one_with_an_image_each_level_once(eager, monkeypatch):
    engine, media = eager.engine, small_media()
    levels = engine.runner.model.deepstack_num_level
    steps = steps_of(engine.runner, monkeypatch)
    with GathersFromBuffer(engine.runner.encoder_runtime.blocks.buffer) as gathers:
        engine.generate([engine_prompt(MediaRequest(before="No picture. "), media)], max_tokens=4)
        assert steps == [False] * 4 and gathers.count == 0
        engine.generate([engine_prompt(MediaRequest(images=("hubble",)), media)], max_tokens=4)
    assert 1 < sum(steps) < len(steps)
    assert gathers.count == sum(steps) * (1 + levels)


def shifted_by_one(rows: torch.Tensor, buffer: torch.Tensor, width: int) -> torch.Tensor:
    return torch.where(rows >= 0, rows + 1, rows)


def zeroed_deepstack(rows: torch.Tensor, buffer: torch.Tensor, width: int) -> torch.Tensor:
    buffer[:, :, width:] = 0
    return rows


@pytest.mark.parametrize("damage", [shifted_by_one, zeroed_deepstack])
def test_control_other_rows_change_what_the_model_makes(eager, stock, damage, monkeypatch):
    runner, requests = eager.engine.runner, mixed_requests()
    take = runner._source_rows.take

    def damaged(num_tokens):
        rows = take(num_tokens)
        buffer = runner.encoder_runtime.blocks.buffer
        return rows if rows is None else damage(rows, buffer, runner.inputs_embeds_size)

    monkeypatch.setattr(runner._source_rows, "take", damaged)
    assert (hidden_states(eager.engine) - stock.hidden).abs().max() > 0.01
    if damage is zeroed_deepstack:
        prompts = [engine_prompt(request, small_media()) for request in requests]
        tokens = [completion.token_ids for completion in eager.engine.generate(prompts, max_tokens=12)]
        text = next(number for number, request in enumerate(requests) if not request.item_keys)
        expected = stock.tokens[len(requests) :]
        assert tokens != expected and tokens[text] == expected[text]


@pytest.mark.parametrize("fault", ["encoder raises", "output NaN", "entry missing"])
def test_an_item_that_fails_fails_its_request_and_no_other(eager, fault):
    asks = (Ask("A. ", ("chelsea",)), Ask("B. ", ("astronaut",)), Ask("C. "))
    answers = eager.ask(asks)
    eager.fresh()
    eager.rpc("plant_fault", fault, ASTRONAUT_ROWS)
    spoilt = eager.ask(asks)
    assert spoilt[1].error in ("EncoderOutputError", "EncoderCacheReadError")
    assert [spoilt[0], spoilt[2]] == [answers[0], answers[2]]
    eager.rpc("remove_faults")
    assert eager.ask(asks) == answers


def test_an_abort_in_the_middle_of_an_item_leaves_no_rows_for_the_next_step(eager):
    asks = (Ask("A. "), Ask("B. ", ("hubble",)), Ask("C. ", ("chelsea",)))
    answers = eager.ask(asks)
    eager.fresh()
    aborted = eager.ask(asks, event=eager.abort, phase="prompt")
    assert aborted[1].tokens is None and [aborted[0], aborted[2]] == [answers[0], answers[2]]
    assert eager.ask(asks) == answers


def test_vllm_copies_no_embeddings_and_keeps_no_buffers_for_them(eager):
    runner = eager.engine.runner
    assert runner.inputs_embeds.gpu.numel() == 0 and runner.model.deepstack_input_embeds == []


def test_a_language_model_of_another_form_is_refused_with_the_remedy():
    from vllm_neuron_cache.integrations.vllm.prefill import require_known_decoder

    model = nn.Module()
    model.language_model = nn.Module()
    model.language_model.model = nn.Identity()
    with pytest.raises(ConfigurationError, match=r"Identity.*Set vllm_neuron_cache.compiled_prefill to false"):
        require_known_decoder(model)
    with pytest.raises(ConfigurationError, match="that of Linear is NoneType"):
        require_known_decoder(nn.Linear(1, 1))

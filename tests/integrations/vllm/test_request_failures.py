"""What a failed request leaves behind for the others: nothing. On real engines, in this process.

Each test of a safeguard has a control beside it in which the safeguard is taken out and the test sees the damage.
"""

import pytest
from asynchrony import asynchronous_scheduling
from engines import start
from faults import FaultInjector
from services import MAX_TOKENS, Answer, Ask, EngineService

from vllm_neuron_cache.demo.media import load_photograph
from vllm_neuron_cache.demo.requests import Media, MediaRequest, engine_prompt
from vllm_neuron_cache.errors import EncoderOutputError, raise_request_errors

pytestmark = pytest.mark.vllm

ROWS = 256  # of "astronaut"
ARGUMENTS = {
    "max_num_batched_tokens": 512,
    "block_size": 32,
    "worker_extension_cls": f"{FaultInjector.__module__}.{FaultInjector.__qualname__}",
}
LONG = "word " * 20
"""Some KV blocks beside the image; two such requests fit into a step if the second finds the blocks of the first."""


@pytest.fixture(scope="module", params=["synchronous", "asynchronous"])
def service(request, checkpoint):
    if request.param == "asynchronous":
        with asynchronous_scheduling():
            engine = start(checkpoint, {"lane": "eager"}, **ARGUMENTS)
            yield EngineService(engine)
            engine.close()
    else:
        engine = start(checkpoint, {"lane": "eager"}, **ARGUMENTS)
        yield EngineService(engine)
        engine.close()


@pytest.fixture(autouse=True)
def undisturbed(service):
    service.fresh()
    yield
    service.fresh()
    service.rpc("check_encoder_cache_integrity")
    assert not service.engine.manager._inputs
    assert not service.engine.scheduler._departures.all()


def clean(service, *asks: Ask) -> list[Answer]:
    answers = service.ask(asks)
    service.fresh()
    return answers


def test_both_readers_of_one_failed_write_fail_and_nobody_else(service):
    asks = (Ask("First. ", ("astronaut",)), Ask("Second. ", ("astronaut",)), Ask("Other. ", ("chelsea",)))
    expected = clean(service, *asks)
    service.rpc("plant_fault", "output NaN", ROWS, "first", 1)
    answers = service.ask(asks)
    assert answers[0].error == answers[1].error == "EncoderOutputError"
    assert answers[2] == expected[2]
    assert service.ask(asks) == expected


def test_one_request_with_a_bad_and_a_good_item_fails_and_the_good_item_stays(service):
    asks = (Ask("Two. ", ("chelsea", "astronaut")), Ask("One. ", ("chelsea",)))
    expected = clean(service, *asks)
    service.rpc("plant_fault", "encoder raises", ROWS)
    answers = service.ask(asks)
    assert answers[0].error == "EncoderOutputError" and "planted in the encoder" in answers[0].message
    assert answers[1] == expected[1]
    service.rpc("remove_faults")
    assert service.ask(asks) == expected
    assert service.engine.manager.stats.invalidations > 0


def test_the_item_named_is_the_bad_one(service):
    service.rpc("plant_fault", "output short", ROWS)
    (answer,) = service.ask([Ask("Two. ", ("chelsea", "astronaut"))])
    key = answer.message.split()[1].rstrip(":")
    assert "[253, 512]" in answer.message and "[256, 512]" in answer.message
    service.rpc("remove_faults")
    service.ask([Ask("One. ", ("astronaut",))])
    assert key in {entry.key for entry in service.engine.worker.check_encoder_cache_integrity()}


def same_prefix() -> tuple[Ask, Ask]:
    """The second finds the KV blocks of the first, image included, in the step that computes them."""
    return Ask("", ("astronaut",), after=LONG), Ask("", ("astronaut",), after=f"{LONG} And why?")


def test_whoever_found_the_kv_blocks_of_a_failed_request_is_computed_again(service):
    asks = same_prefix()
    expected = clean(service, *asks)
    service.rpc("plant_fault", "output NaN", ROWS, "first", 1)
    answers = service.ask(asks)
    assert answers[0].error == "EncoderOutputError"
    assert answers[1] == expected[1]


def test_control_without_looking_for_sharers_the_second_request_is_wrong(service, monkeypatch):
    asks = same_prefix()
    expected = clean(service, *asks)
    monkeypatch.setattr("vllm_neuron_cache.integrations.vllm.failures.FailureHandler._sharers", lambda *args: {})
    service.rpc("plant_fault", "output NaN", ROWS, "first", 1)
    answers = service.ask(asks)
    assert answers[0].error == "EncoderOutputError"
    assert answers[1] != expected[1]


def test_control_without_evicting_kv_blocks_the_next_request_is_wrong(service, monkeypatch):
    ask = Ask(LONG, ("astronaut",))
    expected = clean(service, ask)
    monkeypatch.setattr(service.engine.scheduler.kv_cache_manager, "evict_blocks", lambda blocks: None)
    service.rpc("plant_fault", "output NaN", ROWS, "first", 1)
    assert service.ask([ask])[0].error
    assert service.ask([ask]) != expected


def abort_before_the_report(service, monkeypatch):
    """The client leaves after the step has run, and before its output is taken in."""
    scheduler = service.engine.scheduler
    update = scheduler.update_from_output

    def leaving(scheduler_output, output):
        from vllm.v1.request import RequestStatus

        if getattr(output, "encoder_cache_report", None) is not None:
            scheduler.finish_requests(list(scheduler.requests), RequestStatus.FINISHED_ABORTED)
        return update(scheduler_output, output)

    monkeypatch.setattr(scheduler, "update_from_output", leaving)


def ask_and_leave(service, ask: Ask) -> None:
    """Nothing comes back for a request that the scheduler has aborted by itself; the front end is told as well."""
    llm_engine = service.engine.llm.llm_engine
    from vllm import SamplingParams

    media = Media(images={name: load_photograph(name) for name in ask.images})
    prompt = engine_prompt(MediaRequest(before=ask.text, images=ask.images), media)
    llm_engine.add_request("leaving", prompt, SamplingParams(temperature=0, max_tokens=MAX_TOKENS))
    for _ in range(6):
        llm_engine.step()
    llm_engine.abort_request(["leaving"])


def test_the_kv_blocks_of_a_request_that_left_before_its_report_are_not_found_again(service, monkeypatch):
    ask = Ask(LONG, ("astronaut",))
    expected = clean(service, ask)
    service.rpc("plant_fault", "output NaN", ROWS, "first", 1)
    with monkeypatch.context() as patch:
        abort_before_the_report(service, patch)
        ask_and_leave(service, ask)
    assert not service.engine.scheduler.requests
    assert service.ask([ask]) == expected


def test_control_without_remembering_who_left_the_next_request_is_wrong(service, monkeypatch):
    ask = Ask(LONG, ("astronaut",))
    expected = clean(service, ask)
    service.rpc("plant_fault", "output NaN", ROWS, "first", 1)
    with monkeypatch.context() as patch:
        abort_before_the_report(service, patch)
        patch.setattr("vllm_neuron_cache.integrations.vllm.failures.Departures.note", lambda *args: None)
        ask_and_leave(service, ask)
    assert service.ask([ask]) != expected


def test_an_image_under_a_kv_hit_is_encoded_when_the_request_starts_anew(service):
    """vLLM sends no pixels to the worker with a request that found its image's KV blocks."""
    asks = (Ask("A. ", ("chelsea",)), Ask(LONG, ("astronaut",)))
    expected = clean(service, *asks)
    service.ask(asks)

    def forget_everything(ids):
        service.reset_prefix_cache(running=True)
        service.reset_encoder_cache()

    assert service.ask(asks, event=forget_everything, phase="tokens") == expected
    assert not service.engine.scheduler._withheld._input_ids or service.ask(asks) == expected


@pytest.mark.parametrize("phase", ["queued", "prompt", "tokens"])
def test_rows_that_a_worker_lost_by_itself_cost_a_computation_and_no_request(service, phase):
    asks = (Ask("A. ", ("chelsea",)), Ask("B. ", ("hubble",)), Ask("C. ", ("astronaut",)))
    expected = clean(service, *asks)
    service.ask(asks)
    service.reset_prefix_cache()
    lose = service.engine.runner.note_rows_lost  # not through the engine: only the next step's output tells of it
    assert service.ask(asks, event=lambda ids: lose(), phase=phase) == expected


def test_calls_to_workers_before_there_is_a_scheduler_pass(service):
    """vLLM makes one while it sizes the KV cache; the wrapper of the first engine is there for every later one."""
    from types import SimpleNamespace

    from vllm.v1.engine.core import EngineCore

    starting = SimpleNamespace(model_executor=SimpleNamespace(collective_rpc=lambda *args: ["done"]))
    assert EngineCore.collective_rpc(starting, "update_max_model_len") == ["done"]


def test_a_block_that_was_given_away_is_not_counted_as_the_departed_requests(service):
    """Under the hash that it had, a block is the departed request's still; the null block is nobody's."""
    from types import SimpleNamespace

    from vllm.v1.request import RequestStatus

    from vllm_neuron_cache.integrations.vllm.failures import Departures

    blocks = [SimpleNamespace(block_id=index, block_hash=f"hash {index}") for index in range(5)]
    blocks[3].block_hash = None  # not full
    pool = SimpleNamespace(blocks=blocks, null_block=blocks[0])
    departures = Departures(SimpleNamespace(get_block_ids=lambda request_id: ([1, 2, 3, 4],), block_pool=pool))
    departures.note(SimpleNamespace(request_id="r", status=RequestStatus.RUNNING), seq=7)
    blocks[2].block_hash, blocks[4].block_hash = "another", None
    assert departures.block_ids(departures.get("r")) == [[1, 0, 0, 0]]
    departures.settle("r")
    assert departures.block_ids(departures.get("r")) == [[]]
    departures.acknowledge(6)
    assert departures.get("r")
    departures.acknowledge(7)
    assert not departures.all()


def test_a_report_from_before_a_reset_does_not_undo_it(service):
    from vllm_neuron_cache.encoder_cache.report import WorkerEpochs

    service.rpc("reload_weights")
    known = service.engine.manager.worker_epochs
    assert known == service.engine.worker.encoder_cache_epochs() > WorkerEpochs()
    service.ask([Ask("A. ", ("chelsea",))])
    service.engine.scheduler.follow_workers([known._replace(cache=known.cache - 1)])
    assert service.engine.manager.worker_epochs == known
    assert service.engine.manager.pool.items()


def test_a_failed_request_is_raised_by_the_helper_and_only_then(service):
    from vllm import SamplingParams

    media = Media(images={"astronaut": load_photograph("astronaut")})
    prompt = engine_prompt(MediaRequest(before="Look. ", images=("astronaut",)), media)
    sampling = SamplingParams(temperature=0, max_tokens=2)
    service.rpc("plant_fault", "output NaN", ROWS, "first", 1)
    outputs = service.engine.llm.generate([prompt], sampling, use_tqdm=False)
    assert outputs[0].outputs[0].finish_reason == "error"
    assert outputs[0].outputs[0].stop_reason.startswith("EncoderOutputError: item ")
    with pytest.raises(EncoderOutputError, match="1 of the 256 rows"):
        raise_request_errors(outputs)
    raise_request_errors(service.engine.llm.generate([prompt], sampling, use_tqdm=False))


def test_an_error_of_the_device_is_not_put_on_an_item(service, monkeypatch):
    """Work could not go on without the device, and with several ranks not without the others."""
    import torch

    runner = service.engine.runner
    assert runner._only_an_item_failed(ValueError())
    if hasattr(torch, "AcceleratorError"):
        assert not runner._only_an_item_failed(torch.AcceleratorError("gone"))
    monkeypatch.setattr(runner.parallel_config, "tensor_parallel_size", 2)
    assert not runner._only_an_item_failed(ValueError())

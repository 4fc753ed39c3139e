"""Every fault in every phase of a request, in every way of running the engine: only the addressed request fails.

Four requests run at once, and the second is the victim: its photograph takes several chunks. After each cell the same
four are asked again, and everything is as if nothing had happened.
"""

import re
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
from asynchrony import assert_asynchronous, asynchronous_scheduling
from engines import start
from faults import FaultInjector
from matrix import ABORTED, ENCODER, EVENTS, FAULTS, MODES, READ, SERVED, Cell, table
from servers import serving
from services import Answer, Ask, EngineService, HttpService

pytestmark = pytest.mark.vllm

ASKS = (
    Ask("Describe it.", ("astronaut",)),
    Ask("What is this?", ("china",)),
    Ask("Who are you?"),
    Ask("Which animal?", ("chelsea",)),
)
VICTIM_ROWS = 260
STEP_TOKENS = 192
"""Too few for the victim's photograph, so that it takes several chunks."""
ARGUMENTS = {
    "max_num_batched_tokens": STEP_TOKENS,
    "block_size": 32,
    "worker_extension_cls": f"{FaultInjector.__module__}.{FaultInjector.__qualname__}",
}


class Case:
    """A service with the answers that it gives undisturbed."""

    def __init__(self, service) -> None:
        self.service = service
        self.expected = service.ask(ASKS)
        assert not [answer for answer in self.expected if answer.error]
        self.results: dict[tuple[str, str], str] = {}

    def record(self, cell: Cell, answers: list[Answer]) -> None:
        """Checks the answers of a cell, and that nothing of it is left."""
        result = outcome(answers[1], self.expected[1])
        self.results[cell.fault, cell.phase] = result
        assert result == cell.expected, answers[1]
        others = [(answer, expected) for answer, expected in zip(answers, self.expected)]
        del others[1]
        assert all(answer == expected for answer, expected in others), answers


def outcome(answer: Answer, expected: Answer) -> str:
    if answer == expected:
        return SERVED
    return answer.error or (ABORTED if answer.tokens is None else "other tokens")


@pytest.fixture(scope="module", params=MODES)
def case(request, checkpoint, tmp_path_factory):
    with service_of(request.param, checkpoint, tmp_path_factory) as service:
        case = Case(service)
        yield case
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\n\nFault matrix, {request.param}\n{table('planted in the worker', FAULTS, case.results)}")
        print(f"\n{table('called from outside', EVENTS, case.results)}\n")


@contextmanager
def service_of(mode, checkpoint, tmp_path_factory):
    if mode == "HTTP":
        log = tmp_path_factory.mktemp("faults") / "log"
        with serving(
            checkpoint,
            log,
            additional_config='{"vllm_neuron_cache": {"lane": "eager"}}',
            arguments=[
                *("--max-num-batched-tokens", str(STEP_TOKENS), "--block-size", "32"),
                *("--worker-extension-cls", ARGUMENTS["worker_extension_cls"]),
            ],
            environment={"PYTHONPATH": str(Path(__file__).parent)},
        ) as address:
            service = HttpService(address)
            yield service
            service.close()
        return
    with asynchronous_scheduling() if mode == "asynchronous" else nullcontext(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        engine = start(checkpoint, {"lane": "eager"}, in_process=mode != "separate process", **ARGUMENTS)
        if mode == "asynchronous":
            assert_asynchronous(engine)
        yield EngineService(engine)
        engine.close()


def ids(cell: Cell) -> str:
    return f"{cell.fault}-{cell.phase}"


@pytest.mark.parametrize("cell", FAULTS, ids=ids)
def test_only_the_request_that_meets_the_fault_fails(case, cell):
    service = case.service
    service.fresh()
    if cell.phase == "hit":
        service.ask(ASKS[1:2])
        service.reset_prefix_cache()
    service.rpc("plant_fault", cell.fault, VICTIM_ROWS, cell.phase)
    answers = service.ask(ASKS)
    case.record(cell, answers)
    if answers[1].error:
        assert re.search(rf"\b{VICTIM_ROWS}\b", answers[1].message), answers[1].message
    if cell.phase == "decode":  # the entry is damaged still: whoever reads it next fails, and nobody after
        service.reset_prefix_cache()
        assert service.ask(ASKS)[1].error == READ
    service.rpc("remove_faults")
    assert service.ask(ASKS) == case.expected
    service.rpc("check_encoder_cache_integrity")


@pytest.mark.parametrize("cell", EVENTS, ids=ids)
def test_what_is_called_from_outside_changes_no_tokens(case, cell):
    service = case.service
    if cell.phase == "prompt" and not service.sees_prompts:
        pytest.skip("the middle of a prompt can be seen from inside the engine's process only")
    service.fresh()
    event = {
        "abort": service.abort,
        "reset_encoder_cache": lambda ids: service.reset_encoder_cache(),
        "reset_prefix_cache": lambda ids: service.reset_prefix_cache(),
        "reset_prefix_cache, running too": lambda ids: service.reset_prefix_cache(running=True),
        "reload_weights": lambda ids: service.rpc("reload_weights"),
        "sleep, wake_up": lambda ids: (service.rpc("sleep", 1), service.rpc("wake_up")),
    }[cell.fault]
    case.record(cell, service.ask(ASKS, event=event, phase=cell.phase))
    assert service.ask(ASKS) == case.expected
    service.rpc("check_encoder_cache_integrity")
    if service.sees_prompts:
        assert not [item for item in service.engine.manager.pool.items() if item.references]
        assert not service.engine.scheduler.requests


def test_the_matrix_can_fail(case, monkeypatch):
    """Without the finite check a NaN reaches the victim as tokens, and the KV cache also whoever comes next."""
    service = case.service
    if not service.sees_prompts:
        pytest.skip("the check is taken out in this process")
    service.fresh()
    service.rpc("plant_fault", "output NaN", VICTIM_ROWS)
    monkeypatch.setattr(type(service.engine.runner.encoder_runtime.blocks), "check_output", lambda *args: None)
    assert outcome(service.ask(ASKS)[1], case.expected[1]) not in (ENCODER, SERVED)
    monkeypatch.undo()
    service.rpc("remove_faults")
    assert outcome(service.ask(ASKS)[1], case.expected[1]) != SERVED
    service.fresh()


@pytest.mark.parametrize("fault", ["encoder raises", "entry missing"])
def test_a_stream_ends_with_the_error(case, fault):
    service = case.service
    if not isinstance(service, HttpService):
        pytest.skip("only a server streams")
    service.fresh()
    expected = service.ask(ASKS, stream=True)
    assert expected == case.expected
    service.fresh()
    service.rpc("plant_fault", fault, VICTIM_ROWS)
    answers = service.ask(ASKS, stream=True)
    assert answers[1].error == (ENCODER if fault == "encoder raises" else READ)
    assert f"{VICTIM_ROWS} rows" in answers[1].message
    del answers[1], expected[1]
    assert answers == expected

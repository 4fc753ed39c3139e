"""Two tensor-parallel ranks: tokens are those of one rank and of stock vLLM, and the ranks' tables are equal in every
step. The encoder's and the model's layers are split over two processes; each has the whole buffer."""

import os
import time
from contextlib import contextmanager

import pytest
from engines import mixed_requests, serve, small_media, start
from ranks import OVER_GLOO, TAMPERINGS, RankRecorder, check_ranks_agree, num_evictions, num_steps
from services import Ask, EngineService

from vllm_neuron_cache.demo.requests import engine_prompt

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ARGUMENTS = {"max_num_batched_tokens": 512, "block_size": 32}
# 14 blocks for items: one for the largest photograph alone, so that items push each other out.
SMALL_POOL = {"encoder_cache_block_size": 64, "encoder_cache_num_blocks_exact": 15}
ASTRONAUT_ROWS = 256

# By lane: how the encoder is split, and whether the ranks add up over gloo or, as vLLM does within a machine, in shared
# memory.
WAYS = {"eager": ("weights", False), "inductor": ("data", True)}


class TwoRanks:
    """An engine in a process of its own with two worker processes, what it logs, and calls to both workers."""

    def __init__(self, engine, log, lane: str) -> None:
        self.engine = engine
        self.service = EngineService(engine)
        self.lane = lane
        self._log = log

    def call(self, method: str, *args) -> list:
        """What each of the ranks answers."""
        return self.engine.llm.collective_rpc(method, args=args)

    def check(self) -> list:
        """Raises if ranks differed in a step since `record_steps`, or if one differs from the scheduler's pool now.
        Returns the steps of one of them."""
        ranks = self.call("recorded_steps")
        assert len(ranks) == 2
        check_ranks_agree(ranks)
        self.call("check_encoder_cache_integrity")
        return ranks[0]

    @property
    def log(self) -> str:
        return self._log.read_text()


@pytest.fixture(scope="module")
def expected(checkpoint):
    """Tokens of stock vLLM, and of one rank with the cache, which are the same."""
    tokens = []
    for cache in (None, {"lane": "eager", **SMALL_POOL}):
        engine = start(checkpoint, cache, **ARGUMENTS)
        tokens.append(serve(engine, mixed_requests(), small_media()))
        engine.close()
    assert tokens[0] == tokens[1]
    assert len(set(tokens[0])) > len(mixed_requests()) / 2
    return tokens[0]


@pytest.fixture(scope="module", params=WAYS)
def two_ranks(request, expected, checkpoint, tmp_path_factory):
    lane = request.param
    encoder_mode, over_gloo = WAYS[lane]
    log = tmp_path_factory.mktemp("ranks") / "log"
    with pytest.MonkeyPatch.context() as environment:
        # vLLM binds the threads of each rank to a memory node of its own, and asks for as many nodes as ranks.
        environment.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        environment.setenv("OMP_NUM_THREADS", "1")
        environment.setenv("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "1")
        # vLLM sets it when it makes a configuration; later engines in this process are to find what was there.
        environment.setenv("LOCAL_WORLD_SIZE", "2")
        if over_gloo:
            environment.setenv(OVER_GLOO, "1")
        with output_to(log):
            engine = start(
                checkpoint,
                {"lane": lane, **SMALL_POOL},
                in_process=False,
                tensor_parallel_size=2,
                mm_encoder_tp_mode=encoder_mode,
                worker_extension_cls=f"{RankRecorder.__module__}.{RankRecorder.__qualname__}",
                **ARGUMENTS,
            )
        two_ranks = TwoRanks(engine, log, lane)
        assert two_ranks.call("adds_up_over_gloo") == [over_gloo] * 2
        yield two_ranks
        engine.close()


@pytest.fixture(autouse=True)
def recorded(two_ranks):
    two_ranks.service.fresh()
    two_ranks.call("record_steps")


@contextmanager
def output_to(log):
    """What processes started inside print goes to a file: nothing else of them tells why an engine ended."""
    kept = os.dup(1), os.dup(2)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        for number, descriptor in enumerate(kept, start=1):
            os.dup2(descriptor, number)
            os.close(descriptor)


def test_tokens_are_those_of_one_rank_and_tables_are_equal_in_every_step(two_ranks, expected):
    media, requests = small_media(), mixed_requests()
    assert serve(two_ranks.engine, requests, media) == expected
    before = two_ranks.check()
    two_ranks.service.reset_encoder_cache()
    two_ranks.service.reset_prefix_cache()
    assert two_ranks.call("table") == [{}, {}]
    prompts = [engine_prompt(request, media) for request in requests]
    together = [completion.token_ids for completion in two_ranks.engine.generate(prompts, max_tokens=12)]
    assert together == expected[len(requests) :]

    records = two_ranks.check()
    assert num_steps(records) > num_steps(before) > 0
    assert num_evictions(records) > num_evictions(before) > 0
    assert any(record[3] for record in records)
    stats = two_ranks.call("encoder_cache_stats")
    assert stats[0] == stats[1]
    assert stats[0]["rows_read"] > 0
    assert stats[0]["recompiles_after_warmup"] == 0
    assert (stats[0]["graphs_compiled"] > 0) == (two_ranks.lane == "inductor")


def test_a_reset_in_the_middle_of_requests_is_the_same_on_both_ranks(two_ranks):
    asks = (Ask("A. ", ("chelsea",)), Ask("B. ", ("hubble",)), Ask("C. ", ("astronaut",)))
    answers = two_ranks.service.ask(asks)
    two_ranks.service.reset_prefix_cache()

    def reset(ids) -> None:
        two_ranks.service.reset_encoder_cache()

    assert two_ranks.service.ask(asks, event=reset, phase="tokens") == answers
    assert len({record[1] for record in two_ranks.check()}) > 1


def test_a_reset_on_the_workers_reaches_both_ranks_and_the_pool(two_ranks):
    ask = Ask("A. ", ("chelsea",))
    answers = two_ranks.service.ask([ask])
    (entry, again) = two_ranks.call("check_encoder_cache_integrity")
    assert entry == again and len(entry) == 1
    written = two_ranks.call("encoder_cache_stats")[0]["items_written"]
    epochs = two_ranks.call("encoder_cache_epochs")
    two_ranks.call("reset_encoder_cache")
    assert two_ranks.call("table") == [{}, {}]
    # The pool would miss the entry on both.
    assert two_ranks.call("check_encoder_cache_integrity") == [[], []]
    assert two_ranks.call("encoder_cache_epochs") == [[cache + 1, weights] for cache, weights in epochs]
    two_ranks.service.reset_prefix_cache()
    assert two_ranks.service.ask([ask]) == answers
    assert [stats["items_written"] for stats in two_ranks.call("encoder_cache_stats")] == [written + 1] * 2
    two_ranks.check()


def test_an_output_with_nan_fails_its_request_on_both_ranks_and_no_other(two_ranks):
    asks = (Ask("A. ", ("chelsea",)), Ask("B. ", ("astronaut",)), Ask("C. "))
    answers = two_ranks.service.ask(asks)
    two_ranks.service.fresh()
    two_ranks.call("plant_fault", "output NaN", ASTRONAUT_ROWS)
    spoilt = two_ranks.service.ask(asks)
    assert spoilt[1].error == "EncoderOutputError" and "1 of the 256 rows" in spoilt[1].message
    assert [spoilt[0], spoilt[2]] == [answers[0], answers[2]]
    records = two_ranks.check()
    assert any(entry[4] for record in records for entry in record[3].values()), "no entry was marked as failed"
    two_ranks.call("remove_faults")
    assert two_ranks.service.ask(asks) == answers
    two_ranks.check()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("what", TAMPERINGS)
def test_control_a_rank_that_was_tampered_with_is_found(two_ranks, what, rank):
    two_ranks.service.ask([Ask("A. ", ("chelsea",)), Ask("B. ", ("astronaut",))])
    two_ranks.check()
    two_ranks.call("tamper", rank, what)
    two_ranks.service.ask([Ask("C. ")])
    # The rows themselves are what the comparison is for: nothing in the product reads them all.
    if what != "row changed":
        with pytest.raises(Exception, match=f"rank {rank}.*({'lacks' if what != 'generation raised' else 'tags'})"):
            two_ranks.call("check_encoder_cache_integrity")
    with pytest.raises(AssertionError, match=r"step \d+, applied: rank 1 has .*, rank 0"):
        two_ranks.check()


# The last two tests of each engine: answers of the second rank are no longer those to their calls, and then it ends.
def test_calls_go_on_after_one_that_failed_on_both_ranks(two_ranks):
    """vLLM then takes a rank's answer to the call before for that to the next one, from the second rank on."""
    ask = Ask("A. ", ("chelsea",))
    answers = two_ranks.service.ask([ask])
    two_ranks.call("table")
    with pytest.raises(Exception, match="no such fault"):
        two_ranks.call("plant_fault", "no such fault", 1)
    two_ranks.service.fresh()
    assert two_ranks.call("table")[0] == {}
    assert two_ranks.service.ask([ask]) == answers
    two_ranks.call("reset_encoder_cache")
    two_ranks.service.reset_prefix_cache()
    assert two_ranks.service.ask([ask]) == answers


def test_an_encoder_that_raises_ends_the_engine_and_says_on_what(two_ranks):
    from vllm.v1.engine.exceptions import EngineDeadError

    two_ranks.call("plant_fault", "encoder raises", ASTRONAUT_ROWS)
    begin = time.monotonic()
    with pytest.raises(EngineDeadError):
        two_ranks.service.ask([Ask("A. ", ("chelsea",)), Ask("B. ", ("astronaut",))])
    assert time.monotonic() - begin < 60
    assert "the encoder raised ValueError: planted in the encoder" in two_ranks.log
    assert "because its ranks share the model" in two_ranks.log

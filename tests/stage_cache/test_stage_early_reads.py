"""Reads that are planned before the forward, with threads that never come: whoever needs something does it."""

from types import SimpleNamespace

import pytest
from scripted import BLOCK, Turn, assert_rows, branch, make_stage, text

from vllm_neuron_cache.errors import OmniPrefixCacheUnmatchError
from vllm_neuron_cache.stage_cache.controller import Threading
from vllm_neuron_cache.stage_cache.reads import ReadState

A, B, C = text(1), text(2), text(3)


class NoThread:
    def join(self, timeout=None):
        pass


class Idle(Threading):
    """Threads that are started and do nothing."""

    @staticmethod
    def start(target, name):
        return NoThread()


@pytest.fixture
def stage():
    stage = make_stage(inline=False, threads=Idle, staging_claim_timeout_s=0.2)
    yield stage
    stage.close()


def pending(stage):
    return stage.manager.gauges().pending_reads


def hit(stage, name, blocks=2):
    rows = branch(A, blocks * BLOCK, name)
    return Turn(f"r{name}", rows, blocks * BLOCK, 1, [*range(1, blocks + 1), 20 + name])


def test_everything_works_without_any_thread_coming(stage):
    stage.run(Turn("a", A, 0, 12, [1, 2, 3]))
    first = hit(stage, 2)
    step = stage.step(first, hit(stage, 3, 3))
    stage.run(Turn("n", C, 0, 12, [3, 1, 2]), finished=["a"])
    outputs = stage.take(step)
    assert_rows(outputs, "r2", first.contents[:9])
    assert_rows(outputs, "r3", branch(A, 12, 3)[:13])


def test_a_hit_is_read_early_if_all_its_rows_are_there(stage):
    stage.run(Turn("a", A, 0, 8, [1, 2]))
    stage.announce(hit(stage, 2))
    assert pending(stage) == 1
    assert_rows(stage.take(stage.save(hit(stage, 2))), "r2", hit(stage, 2).contents[:9])
    assert pending(stage) == 0


def test_a_hit_of_the_same_step_is_not_read_early(stage):
    stage.announce(hit(stage, 2), Turn("a", A, 0, 9, [1, 2, 3]))
    assert pending(stage) == 0


def test_a_hit_on_blocks_with_a_hole_is_not_read_early(stage):
    stage.run(Turn("a", A, 0, 7, [1, 2]))
    stage.run(Turn("a", A, 7, 1, [1, 2]), keys=())
    stage.announce(hit(stage, 2))
    assert pending(stage) == 0


def test_a_read_of_a_step_that_was_not_saved_is_given_up(stage):
    stage.run(Turn("a", A, 0, 8, [1, 2]))
    stage.announce(hit(stage, 2))
    stage.announce(Turn("c", C, 0, 1, [9]), finished=["r2"])
    assert pending(stage) == 0
    stage.manager.check_integrity()


def test_a_read_of_a_request_that_is_not_in_the_batch_is_given_up(stage):
    stage.run(Turn("a", A, 0, 8, [1, 2]))
    other = hit(stage, 4, 1)
    stage.announce(hit(stage, 2), other)
    assert pending(stage) == 2
    stage.batch.load(SimpleNamespace(req_ids=["r4"], starts=[4], block_tables=[other.blocks]))
    step = stage.save(other)
    assert pending(stage) == 1
    assert_rows(stage.take(step), "r4", other.contents[:5])
    stage.manager.check_integrity()


def test_a_read_that_is_not_what_the_step_turns_out_to_need_is_planned_anew(stage):
    """The runner computes from somewhere else than was announced."""
    stage.run(Turn("a", A, 0, 8, [1, 2]))
    stage.announce(hit(stage, 2))
    stage.batch.load(SimpleNamespace(req_ids=["r2"], starts=[4], block_tables=[[1, 2, 22]]))
    rows = branch(A, 8, 2)
    step = stage.save(Turn("r2", rows, 4, 1, [1, 2, 22]))
    assert_rows(stage.take(step), "r2", rows[:5])
    assert pending(stage) == 0
    stage.manager.check_integrity()


def test_a_step_that_is_discarded_gives_its_reads_up(stage):
    stage.run(Turn("a", A, 0, 8, [1, 2]))
    step = stage.step(hit(stage, 2), hit(stage, 3))
    assert pending(stage) == 2
    stage.manager.discard_step(step)
    assert pending(stage) == 0
    # Nobody is waited for when the blocks get a new tenant.
    stage.run(Turn("n", C, 0, 8, [1, 2]), finished=["a"])
    assert stage.counters.rows_copied_on_write == 0


def test_a_read_that_was_given_up_is_not_copied(stage):
    stage.run(Turn("a", A, 0, 8, [1, 2]))
    step = stage.step(hit(stage, 2), hit(stage, 3))
    stage.take(step, "r3")
    reads = stage.manager._controller._prefetches
    assert [read.state for read in reads] == [ReadState.CANCELLED, ReadState.DONE]


def test_reads_threatened_by_different_steps_are_all_copied_in_time(stage):
    """The first of the two steps has no rows, so that the next one's writes come after the reads of both."""
    stage.run(Turn("a", A, 0, 4, [1]), Turn("b", B, 0, 4, [2]))
    one, two = branch(A, 4, 4), branch(B, 4, 5)
    step = stage.step(Turn("one", one, 4, 1, [1, 24]), Turn("two", two, 4, 1, [2, 25]))
    stage.run(Turn("n", C, 0, 1, [1]), hidden=None, keys=(), finished=["a"])
    stage.run(Turn("n", C, 1, 3, [1]), Turn("m", C, 0, 4, [2]), finished=["b"])
    stage.settle()
    outputs = stage.take(step)
    assert_rows(outputs, "one", one[:5])
    assert_rows(outputs, "two", two[:5])


def test_a_read_is_copied_once_and_waits_for_what_it_needs_only(stage):
    stage.run(Turn("a", A, 0, 8, [1, 2]))
    step = stage.step(hit(stage, 2))
    stage.run(Turn("c", C, 0, 8, [10, 11]))
    queued = stage.manager.gauges().queued_writes
    assert_rows(stage.take(step), "r2", hit(stage, 2).contents[:9])
    # Writes of later steps are left to whoever comes.
    assert queued == 3
    assert stage.manager.gauges().queued_writes == 2


def test_a_hit_within_a_block_is_refused_before_anything_is_planned(stage):
    stage.run(Turn("a", A, 0, 8, [1, 2]))
    with pytest.raises(OmniPrefixCacheUnmatchError, match="not a whole number"):
        stage.announce(hit(stage, 2), Turn("b", B, 5, 1, [1, 2]))
    assert pending(stage) == 0

"""The cores under any sequence of calls, each against a plain model of it; and that every check can fail."""

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scripted import Turn, branch, text

from vllm_neuron_cache.errors import IntegrityError, OmniPrefixCacheUnmatchError
from vllm_neuron_cache.stage_cache.delivery import DeliveryTracker
from vllm_neuron_cache.stage_cache.interface import WriteState
from vllm_neuron_cache.stage_cache.ownership import LOST, BlockOwnership
from vllm_neuron_cache.stage_cache.reads import HitRead, ReadState
from vllm_neuron_cache.stage_cache.slots import StagingSlots
from vllm_neuron_cache.stage_cache.writes import StepWrite, WriteLog

KEYS = "xyz"


# Ownership ------------------------------------------------------------------------------------------------------------


class OwnershipMachine(RuleBasedStateMachine):
    """The model remembers of every slot, key by key, which tenant wrote it, and of a block that its rows were lost."""

    @initialize(num_blocks=st.integers(1, 4), block_size=st.integers(1, 4))
    def make(self, num_blocks, block_size):
        self.size = block_size
        self.num_blocks = num_blocks
        self.ownership = BlockOwnership(num_blocks, block_size)
        self.tenant = [0] * num_blocks
        self.slots: dict[str, list[list[bool]]] = {}
        self.lost: dict[str, list[bool]] = {}
        self.readers = [0] * num_blocks
        self.writes: list[tuple[list[str], list[int], list[int]]] = []
        self.last = [-1] * num_blocks
        self.step = 0

    def blocks(self, data, min_size=1):
        ids = st.lists(st.integers(0, self.num_blocks - 1), unique=True, min_size=min_size)
        return data.draw(ids, label="blocks")

    @rule(key=st.sampled_from(KEYS))
    def open_key(self, key):
        self.ownership.open_key(key)
        self.slots.setdefault(key, [[False] * self.size for _ in range(self.num_blocks)])
        self.lost.setdefault(key, [False] * self.num_blocks)

    @rule(key=st.sampled_from(KEYS))
    def close_key(self, key):
        self.ownership.close_key(key)
        self.slots.pop(key, None)
        self.lost.pop(key, None)

    @rule(data=st.data())
    def begin_tenancy(self, data):
        self.step += 1
        blocks = self.blocks(data)
        threatened = self.ownership.begin_tenancy(blocks, self.step)
        assert threatened.tolist() == [block for block in blocks if self.readers[block]]
        for block in blocks:
            self.tenant[block] = self.step
            for key in self.slots:
                self.slots[key][block] = [False] * self.size
                self.lost[key][block] = False

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def write(self, data):
        """Of one tenant in each block, from where it is, or back from there, or with a gap."""
        self.step += 1
        keys = data.draw(st.lists(st.sampled_from(sorted(self.slots)), unique=True), label="keys")
        blocks = self.blocks(data)
        offsets = [data.draw(st.integers(0, self.size - 1), label="offset") for _ in blocks]
        counts = [data.draw(st.integers(1, self.size - offset), label="rows") for offset in offsets]
        self.ownership.record_write(keys, np.array(blocks), np.array(offsets), np.array(counts), self.step)
        for block, offset, count in zip(blocks, offsets, counts):
            self.last[block] = self.step
            for key in keys:
                rows = self.slots[key][block]
                if offset and (self.lost[key][block] or not all(rows[:offset])):
                    continue  # a gap before it
                self.lost[key][block] = False
                self.slots[key][block] = [True] * (offset + count) + [False] * (self.size - offset - count)
        self.writes.append((keys, blocks, [self.tenant[block] for block in blocks]))

    @precondition(lambda self: self.writes)
    @rule(data=st.data())
    def lose(self, data):
        """One of the writes fails, maybe long after."""
        keys, blocks, tenants = self.writes.pop(data.draw(st.integers(0, len(self.writes) - 1), label="which"))
        self.ownership.lose(keys, np.array(blocks), np.array(tenants))
        for block, tenant in zip(blocks, tenants):
            for key in keys:
                if key in self.lost and self.tenant[block] == tenant:
                    self.lost[key][block] = True
                    self.slots[key][block] = [False] * self.size

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def a_write_fails_after_its_blocks_went_to_others(self, data):
        self.write(data=data)
        self.begin_tenancy(data=data)
        self.write(data=data)
        self.lose(data=data)

    @rule(data=st.data())
    def add_reader(self, data):
        blocks = self.blocks(data)
        self.ownership.add_reader(np.array(blocks))
        for block in blocks:
            self.readers[block] += 1

    @precondition(lambda self: any(self.readers))
    @rule()
    def remove_readers(self):
        blocks = [block for block, readers in enumerate(self.readers) if readers]
        self.ownership.remove_reader(np.array(blocks))
        for block in blocks:
            self.readers[block] -= 1

    @invariant()
    def it_agrees_with_the_model(self):
        if not hasattr(self, "ownership"):
            return
        self.ownership.check_integrity()
        assert set(self.ownership.keys) == set(self.slots)
        everything = np.arange(self.num_blocks)
        for key, blocks in self.slots.items():
            expected = [LOST if self.lost[key][block] else sum(rows) for block, rows in enumerate(blocks)]
            assert self.ownership.num_present(key, everything).tolist() == expected
        assert self.ownership.last_write.tolist() == self.last
        assert self.ownership.num_readers.tolist() == self.readers


TestOwnership = OwnershipMachine.TestCase


@pytest.mark.parametrize("wrong", ["too many rows", "of a later tenant", "fewer than no readers"])
def test_what_ownership_checks_can_fail(wrong):
    ownership = BlockOwnership(4, 2)
    ownership.open_key("x")
    ownership.begin_tenancy([1, 2], 1)
    ownership.record_write(["x"], np.array([1, 2]), np.array([0, 0]), np.array([2, 1]), 1)
    ownership.check_integrity()
    if wrong == "too many rows":
        ownership._marks["x"][2] += 2
    elif wrong == "of a later tenant":
        ownership._marks["x"][2] += 9 * 4
    else:
        ownership.remove_reader(np.array([2]))
    with pytest.raises(IntegrityError, match=r"blocks \[2\]"):
        ownership.check_integrity()


# Delivery -------------------------------------------------------------------------------------------------------------


class DeliveryMachine(RuleBasedStateMachine):
    """The model keeps the set of positions that each request was handed, and what its next step starts at."""

    requests = st.sampled_from("abcd")

    @initialize()
    def make(self):
        self.tracker = DeliveryTracker()
        self.handed: dict[str, set[int]] = {}
        self.next: dict[str, int] = {}
        self.anywhere: set[str] = set()
        self.drafting: set[str] = set()

    @rule(req_id=requests)
    def admit(self, req_id):
        if req_id in self.handed:
            with pytest.raises(IntegrityError):
                self.tracker.admit(req_id)
            return
        self.tracker.admit(req_id)
        self.handed[req_id] = set()
        self.next[req_id] = 0
        self.anywhere.add(req_id)  # it may have a hit

    @rule(req_id=requests)
    def finish(self, req_id):
        self.tracker.finish(req_id)
        for record in (self.handed, self.next):
            record.pop(req_id, None)
        self.anywhere.discard(req_id)
        self.drafting.discard(req_id)

    @rule(req_id=requests, num_tokens=st.none() | st.integers(1, 30))
    def restart(self, req_id, num_tokens):
        if req_id not in self.handed:
            with pytest.raises(OmniPrefixCacheUnmatchError, match=f"request {req_id}"):
                self.tracker.restart(req_id, num_tokens)
            return
        self.tracker.restart(req_id, num_tokens)
        self.anywhere.add(req_id)
        if num_tokens is not None and req_id in self.drafting:
            # What lies at and behind the last token was of drafts.
            self.handed[req_id] = {position for position in self.handed[req_id] if position < num_tokens - 1}
            self.next[req_id] = min(self.next[req_id], num_tokens - 1)

    @precondition(lambda self: self.handed)
    @rule(data=st.data())
    def step(self, data):
        batch = data.draw(st.permutations(sorted(self.handed)), label="batch")
        batch = batch[: data.draw(st.integers(1, len(batch)), label="size")]
        starts, counts = [], []
        for req_id in batch:
            moves = ["goes on", "goes on", "is left alone"]
            moves += ["starts anywhere"] * (2 * (req_id in self.anywhere)) + ["rolls back"] * (self.next[req_id] > 0)
            move = data.draw(st.sampled_from(moves), label="move")
            counts.append(0 if move == "is left alone" else data.draw(st.integers(1, 5), label="count"))
            somewhere = st.just(len(self.handed[req_id])) | st.integers(0, 20)
            if move == "starts anywhere":
                starts.append(data.draw(somewhere, label="start"))
            elif move == "rolls back" and req_id not in self.anywhere:
                starts.append(data.draw(st.integers(0, self.next[req_id] - 1), label="start"))
                self.drafting.add(req_id)
                self.tracker.speculate([req_id])
            elif not counts[-1]:
                starts.append(data.draw(somewhere, label="start"))
            else:
                starts.append(self.next[req_id])
        firsts = self.tracker.plan(batch, np.array(starts), np.array(counts))
        assert firsts.tolist() == [
            self.first(req_id, start, count) for req_id, start, count in zip(batch, starts, counts)
        ]

    def first(self, req_id, start, count):
        """The first position that is handed on, once the step is over."""
        handed = self.handed[req_id]
        if count and req_id not in self.anywhere and start < self.next[req_id]:
            # Positions that are computed anew were of drafts.
            handed = {position for position in handed if position < start}
        first = len(handed)
        if count:
            self.handed[req_id] = handed | set(range(first, start + count))
            self.next[req_id] = start + count
            self.anywhere.discard(req_id)
        return first

    @rule()
    def a_stranger_in_the_batch(self):
        batch = [*self.handed, "stranger"]
        zeros = np.zeros(len(batch), dtype=np.int64)
        with pytest.raises(OmniPrefixCacheUnmatchError, match="request stranger is in the batch"):
            self.tracker.plan(batch, zeros, zeros)

    @invariant()
    def it_agrees_with_the_model(self):
        if not hasattr(self, "tracker"):
            return
        self.tracker.check_integrity()
        assert len(self.tracker) == len(self.handed)
        for req_id in "abcd":
            assert (req_id in self.tracker) == (req_id in self.handed)
        for req_id, handed in self.handed.items():
            assert handed == set(range(len(handed)))
            assert self.tracker.delivered(req_id) == len(handed)


TestDelivery = DeliveryMachine.TestCase


def test_a_tracker_grows_with_its_requests():
    tracker = DeliveryTracker()
    names = [f"r{index}" for index in range(700)]
    for index, name in enumerate(names):
        tracker.admit(name)
        tracker.plan([name], np.array([0]), np.array([index + 1]))
    assert [tracker.delivered(name) for name in names] == list(range(1, 701))
    for name in names[::2]:
        tracker.finish(name)
    tracker.check_integrity()
    for name in names[::2]:
        tracker.admit(name)
    assert [tracker.delivered(name) for name in names[:4]] == [0, 2, 0, 4]
    tracker.check_integrity()


def test_a_restart_is_over_when_its_request_is_scheduled_and_not_before():
    tracker = DeliveryTracker()
    tracker.admit("a")
    assert tracker.plan(["a"], np.array([0]), np.array([4])).tolist() == [0]
    tracker.restart("a")
    assert tracker.plan(["a"], np.array([4]), np.array([0])).tolist() == [4]  # in the batch and left alone
    assert tracker.plan(["a"], np.array([0]), np.array([6])).tolist() == [4]
    assert tracker.plan(["a"], np.array([3]), np.array([1])).tolist() == [3]


def test_an_id_used_again_has_no_drafts_behind_it():
    """What a request has in tokens may be told late, and matters after drafts alone."""
    tracker = DeliveryTracker()
    for drafts in (True, False):
        tracker.admit("a")
        tracker.plan(["a"], np.array([0]), np.array([8]))
        if drafts:
            tracker.speculate(["a"])
        tracker.restart("a", 6)
        assert tracker.delivered("a") == (5 if drafts else 8)
        tracker.finish("a")


@pytest.mark.parametrize("wrong", ["an index used twice", "rows that nobody hands on"])
def test_what_the_tracker_checks_can_fail(wrong):
    tracker = DeliveryTracker()
    tracker.admit("a")
    tracker.plan(["a"], np.array([0]), np.array([3]))
    tracker.check_integrity()
    if wrong == "an index used twice":
        tracker._free.append(tracker._index_of["a"])
    else:
        tracker._delivered[tracker._index_of["a"]] = 2
    with pytest.raises(IntegrityError):
        tracker.check_integrity()


# Writes ---------------------------------------------------------------------------------------------------------------


def make_write(step, num_bytes=0):
    return StepWrite(
        step=step,
        keys=["x"],
        staged=None,
        block_ids=np.array([1]),
        epochs=np.array([1]),
        num_rows=1,
        after=[],
        num_bytes=num_bytes,
    )


class WriteLogMachine(RuleBasedStateMachine):
    """The model is a list of [step, bytes, state], and the last step that may run."""

    @initialize()
    def make(self):
        self.log = WriteLog()
        self.step = 0
        self.upto = -1
        self.waiting: list[list] = []
        self.running = None

    @rule(num_bytes=st.integers(0, 9), skip=st.integers(1, 2))
    def append(self, num_bytes, skip):
        self.step += skip
        write = make_write(self.step, num_bytes)
        self.log.append(write)
        self.waiting.append([self.step, num_bytes, write])

    @precondition(lambda self: self.waiting)
    @rule(back=st.integers(0, 3))
    def append_out_of_order(self, back):
        with pytest.raises(IntegrityError, match="comes after"):
            self.log.append(make_write(self.waiting[-1][0] - back))

    @rule(data=st.data())
    def queue(self, data):
        upto = data.draw(st.integers(-1, self.step + 2), label="up to")
        newly = any(self.upto < step <= upto for step, _, _ in self.waiting)
        assert self.log.queue_upto(upto) is newly
        self.upto = max(self.upto, upto)

    @rule()
    def take(self):
        write = self.log.take()
        may_run = self.waiting and self.waiting[0][0] <= self.upto and self.running is None
        assert write is (self.waiting[0][2] if may_run else None)
        if write is not None:
            assert write.state is WriteState.COPYING
            self.running = write

    @precondition(lambda self: self.running is not None)
    @rule(fails=st.booleans(), early=st.booleans())
    def end(self, fails, early):
        with pytest.raises(IntegrityError):
            self.log.drop(self.running)
        if not (fails and early):
            self.running.move_to(WriteState.HOST_READY)
        self.running.move_to(WriteState.FAILED if fails else WriteState.WRITTEN)
        self.log.drop(self.running)
        self.waiting.pop(0)
        self.running = None

    @precondition(lambda self: len(self.waiting) > 1)
    @rule()
    def drop_another(self):
        with pytest.raises(IntegrityError, match="is not the oldest that ended"):
            self.log.drop(self.waiting[-1][2])

    @invariant()
    def it_agrees_with_the_model(self):
        if not hasattr(self, "log"):
            return
        self.log.check_integrity()
        assert len(self.log) == len(self.waiting)
        assert self.log.head is (self.waiting[0][2] if self.waiting else None)
        assert self.log.num_bytes == sum(num_bytes for _, num_bytes, _ in self.waiting)
        for step, _, write in self.waiting:
            if write is not self.running:
                assert write.state is (WriteState.QUEUED if step <= self.upto else WriteState.PENDING)
        for step in range(self.step + 2):
            assert self.log.is_done(step) == all(other > step for other, _, _ in self.waiting)
        for limit in (-3, 0, 4, 11):
            left, last = self.log.num_bytes, None
            for step, num_bytes, _ in self.waiting:
                if left <= limit:
                    break
                left, last = left - num_bytes, step
            assert self.log.oldest_over(limit) == last


TestWriteLog = WriteLogMachine.TestCase


CHAIN = ["PENDING", "QUEUED", "COPYING", "HOST_READY", "WRITTEN"]


@pytest.mark.parametrize("reached", [*CHAIN, "FAILED"])
@pytest.mark.parametrize("target", [*CHAIN, "FAILED"])
def test_a_write_moves_one_step_at_a_time(reached, target):
    write = make_write(3)
    for name in [*CHAIN[1:], None]:
        if write.state.name == reached or name is None:
            break
        write.move_to(WriteState[name])
    if reached == "FAILED":
        write = make_write(3)
        write.move_to(WriteState.FAILED)
    finished = reached in ("WRITTEN", "FAILED")
    legal = not finished and (target == "FAILED" or CHAIN.index(target) == CHAIN.index(reached) + 1)
    if legal:
        write.move_to(WriteState[target])
        assert write.state is WriteState[target]
    else:
        with pytest.raises(OmniPrefixCacheUnmatchError, match=f"write of step 3 cannot go from {reached} to {target}"):
            write.move_to(WriteState[target])
        assert write.state is WriteState[reached]


@pytest.mark.parametrize("wrong", ["order", "turn", "bytes"])
def test_what_the_log_checks_can_fail(wrong):
    log = WriteLog()
    for step in (1, 2, 3):
        log.append(make_write(step, 5))
    log.queue_upto(3)
    log.check_integrity()
    if wrong == "order":
        log._writes.rotate(1)
    elif wrong == "turn":
        log._writes[1].move_to(WriteState.COPYING)
    else:
        log.num_bytes -= 1
    with pytest.raises(IntegrityError):
        log.check_integrity()


# Reads ----------------------------------------------------------------------------------------------------------------


def make_read(first, stop, block_size=4, present=None, blocks=None):
    num_blocks = -(-stop // block_size) - first // block_size
    blocks = list(range(10, 10 + num_blocks)) if blocks is None else blocks
    present = {"x": [block_size] * num_blocks} if present is None else present
    return HitRead(
        req_id="r",
        first=first,
        stop=stop,
        block_ids=np.array(blocks),
        epochs=np.array([1] * num_blocks),
        block_size=block_size,
        present={key: np.array(rows, dtype=np.int32) for key, rows in present.items()},
        num_new=2,
        needs_step=1,
    )


@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_slots_of_any_stretch_of_positions(block_size):
    blocks = [7, 2, 9, 4, 11, 1, 8, 3, 5, 6, 0, 10]
    for first in range(12):
        for stop in range(first + 1, 13):
            own = blocks[first // block_size : -(-stop // block_size)]
            read = make_read(first, stop, block_size, blocks=own)
            expected = [
                blocks[position // block_size] * block_size + position % block_size for position in range(first, stop)
            ]
            assert read.slots.tolist() == expected
            assert read.num_hit == stop - first


@pytest.mark.parametrize("present", [[4, 4, 4], [4, 4, 2], [4, 4, 1], [4, 0, 4], [3, 4, 4], [0, 0, 0], [4, 4, -1]])
@pytest.mark.parametrize(("first", "stop"), [(0, 12), (0, 10), (2, 9), (3, 11), (1, 12)])
def test_what_is_absent_of_a_read(present, first, stop):
    read = make_read(first, stop, present={"x": present, "y": [0, 0, 0]})
    absent = [position % 4 >= present[position // 4] for position in range(first, stop)]
    # The first rows of the first block need not be asked for, and are there if later ones are.
    complete = all(position % 4 < present[position // 4] for position in range(stop))
    assert read.is_complete("x") is complete
    found = read.absent("x")
    assert (found is None) if complete else (found.tolist() == absent)
    assert read.absent("y").all() and len(read.absent("y")) == stop - first
    assert read.absent("never heard of").all()
    assert set(read.keys) == ({"x"} if any(present) else set())
    assert read.lost == ({"x"} if -1 in present else set())


def test_a_read_ends_once():
    read = make_read(0, 4)
    assert read.state is ReadState.PLANNED and not read.has_ended
    for state in (ReadState.DONE, ReadState.CANCELLED):
        read.state = state
        assert read.has_ended
    read.state = ReadState.COPYING
    assert not read.has_ended


# Staging slots --------------------------------------------------------------------------------------------------------


class SlotsMachine(RuleBasedStateMachine):
    @initialize(depth=st.integers(1, 4))
    def make(self, depth):
        self.slots = StagingSlots(depth)
        self.holders = [0] * depth

    @rule()
    def claim(self):
        free = [slot for slot, holders in enumerate(self.holders) if not holders]
        slot = self.slots.claim()
        if not free:
            assert slot is None
            return
        assert slot in free
        self.holders[slot] = 1

    @rule(data=st.data())
    def hold_or_release(self, data):
        slot = data.draw(st.integers(0, len(self.holders) - 1))
        call, change = data.draw(st.sampled_from([(self.slots.hold, 1), (self.slots.release, -1)]))
        if not self.holders[slot]:
            with pytest.raises(IntegrityError, match=f"staging slot {slot}"):
                call(slot)
            return
        call(slot)
        self.holders[slot] += change

    @invariant()
    def as_many_are_free(self):
        if hasattr(self, "slots"):
            assert self.slots.num_free == self.holders.count(0)


TestSlots = SlotsMachine.TestCase


# The whole ------------------------------------------------------------------------------------------------------------


def busy_stage(make):
    stage = make()
    stage.run(Turn("a", text(1), 0, 8, [1, 2]))
    stage.settle()
    stage.step(Turn("b", branch(text(1), 8, 2), 8, 1, [1, 2, 3]))
    stage.settle()
    stage.manager.check_integrity()
    return stage


@pytest.mark.parametrize("wrong", ["readers", "slots", "keys", "log", "tracker", "ownership"])
def test_what_the_manager_checks_can_fail(make, wrong):
    stage = busy_stage(make)
    manager = stage.manager
    controller = manager._controller
    if wrong == "readers":
        manager._ownership.num_readers[5] += 1
    elif wrong == "slots":
        controller._slot_of[object()] = 0
    elif wrong == "keys":
        manager._ownership.open_key("ghost")
    elif wrong == "log":
        controller._deferred.num_bytes += 1
    elif wrong == "tracker":
        manager._tracker._delivered[manager._tracker._index_of["a"]] = 0
    else:
        manager._ownership._marks["k"][1] += 99
    with pytest.raises(IntegrityError):
        manager.check_integrity()
    manager.shutdown()

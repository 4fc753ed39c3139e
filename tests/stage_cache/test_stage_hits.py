"""Who is handed which rows: hits and what becomes of their blocks, preemption, chunks, drafts. In every form."""

import pytest
import torch
from scripted import BLOCK, WIDTH, Turn, assert_rows, branch, hidden_rows, key_rows, text, zeros

from vllm_neuron_cache.errors import OmniPrefixCacheUnmatchError
from vllm_neuron_cache.stage_cache import ModelCachePolicy

DEFERRED = ModelCachePolicy(deferred_keys=frozenset({"k"}))

A, B, C = text(1), text(2), text(3)

both_kinds = pytest.mark.parametrize("policy", [ModelCachePolicy(), DEFERRED], ids=["immediate", "deferred"])


# Hits -----------------------------------------------------------------------------------------------------------------


@both_kinds
def test_a_hit_of_whole_blocks_and_the_divergent_tail(make, policy):
    stage = make(policy=policy)
    assert_rows(stage.run(Turn("a", A, 0, 10, [1, 2, 3])), "a", A[:10])
    b = branch(A, 8, 2)
    assert_rows(stage.run(Turn("b", b, 8, 5, [1, 2, 4, 5])), "b", b[:13])
    # The tail is kept under blocks of its own, and A's third block is as it was.
    c = branch(b, 12, 3)
    assert_rows(stage.run(Turn("c", c, 12, 2, [1, 2, 4, 6])), "c", c[:14])
    assert_rows(stage.run(Turn("a", A, 10, 2, [1, 2, 3])), "a", A[10:12])
    d = branch(A, 12, 4)
    assert_rows(stage.run(Turn("d", d, 12, 1, [1, 2, 3, 7])), "d", d[:13])


@both_kinds
@pytest.mark.parametrize("finished_first", [False, True])
def test_a_hit_on_a_request_that_is_over_or_goes_on(make, policy, finished_first):
    stage = make(policy=policy)
    stage.run(Turn("a", A, 0, 8, [1, 2]))
    b = branch(A, 8, 2)
    turn = Turn("b", b, 8, 4, [1, 2, 3])
    if finished_first:
        outputs = stage.run(turn, finished=["a"])
    else:
        outputs = stage.run(Turn("a", A, 8, 1, [1, 2, 4]), turn)
        assert_rows(outputs, "a", A[8:9])
    assert_rows(outputs, "b", b[:12])


def test_rows_of_many_steps_come_back_as_one_hit(make):
    stage = make()
    for start in range(12):
        assert_rows(stage.run(Turn("a", A, start, 1, [1, 2, 3][: start // BLOCK + 1])), "a", A[start : start + 1])
    b = branch(A, 12, 2)
    assert_rows(stage.run(Turn("b", b, 12, 1, [1, 2, 3, 4])), "b", b[:13])


def test_mixed_hit_lengths_in_one_batch(make):
    stage = make()
    stage.run(Turn("a", A, 0, 12, [3, 1, 2]))
    b, c, d = branch(A, 4, 2), branch(A, 12, 3), text(4)
    outputs = stage.run(Turn("b", b, 4, 3, [3, 9]), Turn("d", d, 0, 6, [7, 5]), Turn("c", c, 12, 2, [3, 1, 2, 8]))
    assert_rows(outputs, "b", b[:7])
    assert_rows(outputs, "c", c[:14])
    assert_rows(outputs, "d", d[:6])


@pytest.mark.parametrize("hit_blocks", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("tail", [1, 3, 4, 9])
def test_the_hidden_states_are_as_long_as_the_tokens(make, hit_blocks, tail):
    stage = make()
    stage.run(Turn("a", A, 0, 20, [1, 2, 3, 4, 5]))
    hit = hit_blocks * BLOCK
    b = branch(A, hit, 2)
    outputs = stage.run(Turn("b", b, hit, tail, [*range(1, hit_blocks + 1), 8, 9, 10]))
    assert len(outputs.hidden_states["b"]) == len(outputs.mm_outputs["k"]["b"]) == hit + tail
    assert_rows(outputs, "b", b[: hit + tail])


@both_kinds
def test_a_hit_on_blocks_that_the_same_step_computes(make, policy):
    stage = make(policy=policy)
    b = branch(A, 8, 2)
    # Whichever comes first in the batch.
    outputs = stage.run(Turn("b", b, 8, 3, [1, 2, 3]), Turn("a", A, 0, 9, [1, 2, 4]))
    assert_rows(outputs, "a", A[:9])
    assert_rows(outputs, "b", b[:11])
    c = branch(b, 8, 3)
    outputs = stage.run(Turn("a", A, 9, 3, [1, 2, 4]), Turn("c", c, 8, 1, [1, 2, 5]))
    assert_rows(outputs, "c", c[:9])


@both_kinds
def test_a_hit_of_the_same_step_on_recycled_blocks(make, policy):
    stage = make(policy=policy)
    stage.occupy(1, 2, 3, name=9)
    b = branch(A, 8, 2)
    step = stage.step(Turn("a", A, 0, 9, [2, 1, 4]), Turn("b", b, 8, 2, [2, 1, 3]), finished=[stage.ended])
    later = stage.step(Turn("c", C, 0, 8, [2, 1]), finished=["a", "b"])
    assert_rows(stage.take(later), "c", C[:8])
    outputs = stage.take(step)
    assert_rows(outputs, "a", A[:9])
    assert_rows(outputs, "b", b[:10])


def test_a_hit_that_reaches_over_old_blocks_and_those_of_the_same_step(make):
    stage = make()
    stage.run(Turn("a", A, 0, 4, [1]))
    b = branch(A, 12, 2)
    outputs = stage.run(Turn("a", A, 4, 8, [1, 2, 3]), Turn("b", b, 12, 1, [1, 2, 3, 4]))
    assert_rows(outputs, "a", A[4:12])
    assert_rows(outputs, "b", b[:13])


def test_a_hit_is_handed_on_in_full_by_the_first_step_and_not_again(make):
    stage = make()
    stage.run(Turn("a", A, 0, 8, [1, 2]))
    b = branch(A, 8, 2)
    assert_rows(stage.run(Turn("b", b, 8, 2, [1, 2, 3])), "b", b[:10])
    assert_rows(stage.run(Turn("b", b, 10, 2, [1, 2, 3])), "b", b[10:12])


# Blocks and their tenants ---------------------------------------------------------------------------------------------


@both_kinds
def test_delayed_reads_keep_the_rows_of_the_tenants_that_they_hit(make, policy):
    stage = make(policy=policy)
    stage.run(Turn("a", A, 0, 12, [1, 2, 3]))
    steps = []
    for name, hit in ((2, 4), (3, 8), (4, 12)):
        rows = branch(A, hit, name)
        blocks = [*[1, 2, 3][: hit // BLOCK], 10 + name]
        steps.append((stage.step(Turn(f"r{name}", rows, hit, 2, blocks)), f"r{name}", rows[: hit + 2]))
    stage.run(Turn("new", B, 0, 12, [3, 1, 2]), finished=["a", "r2", "r3", "r4"])
    for step_id, req_id, rows in reversed(steps):
        assert_rows(stage.take(step_id), req_id, rows)
    d = branch(B, 12, 5)
    assert_rows(stage.run(Turn("d", d, 12, 1, [3, 1, 2, 20])), "d", d[:13])


def test_a_read_survives_several_tenants_of_its_blocks(make):
    stage = make(staging_depth=2)
    stage.run(Turn("a", A, 0, 8, [1, 2]))
    b = branch(A, 8, 2)
    step = stage.step(Turn("b", b, 8, 1, [1, 2, 3]))
    for name in range(10, 14):
        stage.run(Turn(f"n{name}", text(name), 0, 8, [2, 1] if name % 2 else [1, 2]), finished=["a", f"n{name - 1}"])
    assert_rows(stage.take(step), "b", b[:9])


def test_a_block_recycled_before_any_row_is_written_is_protected_too(make):
    """The new tenant's first step has no outputs at all, the next one has."""
    stage = make()
    stage.run(Turn("a", A, 0, 8, [1, 2]))
    b = branch(A, 8, 2)
    step = stage.step(Turn("b", b, 8, 1, [1, 2, 3]))
    stage.run(Turn("n", C, 0, 4, [1]), hidden=None, keys=(), finished=["a"])
    stage.run(Turn("n", C, 4, 4, [1, 2]))
    assert_rows(stage.take(step), "b", b[:9])


@pytest.mark.parametrize("late", [False, True])
def test_a_recycled_block_without_rows_of_a_key_has_none(make, late):
    """The old tenant wrote the key; the new one does not. Never the old tenant's rows, also where they are asked for
    late."""
    stage = make()
    stage.run(Turn("o", C, 0, 8, [1, 2]))
    stage.run(Turn("a", A, 0, 8, [1, 2]), keys=(), finished=["o"])
    b = branch(A, 8, 2)
    step = stage.step(Turn("b", b, 8, 3, [1, 2, 3]), finished=["a"])
    if late:
        stage.run(Turn("n", text(7), 0, 8, [2, 1]), finished=["b"])
    outputs = stage.take(step)
    assert outputs.hidden_states["b"].tolist() == hidden_rows(b[:11])
    assert outputs.mm_outputs["k"]["b"].tolist() == zeros(8) + key_rows(b[8:11])


def test_a_recycled_block_without_hidden_states_fails_the_hit_and_nobody_else(make):
    stage = make()
    stage.run(Turn("o", C, 0, 8, [1, 2]))
    stage.run(Turn("a", A, 0, 8, [1, 2]), hidden=None, finished=["o"])
    b, d = branch(A, 8, 2), text(4)
    step = stage.step(Turn("b", b, 8, 3, [1, 2, 3]), Turn("d", d, 0, 5, [4, 5]), mm={"note": ["x"]})
    with pytest.raises(OmniPrefixCacheUnmatchError, match=r"request b: .*positions 0 to 7 .*never saved") as caught:
        stage.take(step)
    assert caught.value.request_ids == ("b",)
    assert set(caught.value.outputs.hidden_states) == {"d"}
    assert {req for values in caught.value.outputs.mm_outputs.values() for req in values} == {"d"}
    assert_rows(caught.value.outputs, "d", d[:5])
    # The engine goes on, and so does the other one.
    assert_rows(stage.run(Turn("d", d, 5, 1, [4, 5]), finished=["b"]), "d", d[5:6])


def test_a_hole_in_the_middle_of_the_hidden_states_is_an_error(make):
    stage = make()
    stage.run(Turn("a", A, 0, 3, [1]))
    stage.run(Turn("a", A, 3, 2, [1, 2]), hidden=None)
    stage.run(Turn("a", A, 5, 3, [1, 2]))
    for name, hit in ((2, 4), (3, 8)):
        b = branch(A, hit, name)
        step = stage.step(Turn(f"b{name}", b, hit, 1, [*range(1, hit // BLOCK + 1), 10 + name]))
        with pytest.raises(OmniPrefixCacheUnmatchError, match="never saved"):
            stage.take(step)


def test_a_hole_in_the_middle_of_a_key_is_zeros_from_there_on(make):
    stage = make()
    stage.run(Turn("a", A, 0, 2, [1]))
    stage.run(Turn("a", A, 2, 1, [1]), keys=())
    stage.run(Turn("a", A, 3, 5, [1, 2]))
    b = branch(A, 8, 2)
    rows = stage.run(Turn("b", b, 8, 1, [1, 2, 3])).mm_outputs["k"]["b"].tolist()
    assert rows == key_rows(b[:2]) + zeros(2) + key_rows(b[4:9])


def test_the_next_tenant_after_one_with_a_hole_is_whole(make):
    stage = make()
    stage.run(Turn("o", C, 0, 4, [1]), hidden=None, keys=())
    stage.run(Turn("a", A, 0, 4, [1]), finished=["o"])
    b = branch(A, 4, 2)
    assert_rows(stage.run(Turn("b", b, 4, 1, [1, 2])), "b", b[:5])


@both_kinds
def test_a_request_aborted_after_its_hashes_were_published_leaves_its_rows(make, policy):
    stage = make(policy=policy)
    step = stage.step(Turn("a", A, 0, 9, [1, 2, 3]))
    stage.manager.discard_step(step)
    b = branch(A, 8, 2)
    assert_rows(stage.run(Turn("b", b, 8, 1, [1, 2, 4]), finished=["a"]), "b", b[:9])


def test_a_block_never_seen_is_no_hit(make):
    """KV blocks that were filled before the cache was there."""
    stage = make()
    with pytest.raises(OmniPrefixCacheUnmatchError, match="never saved") as caught:
        stage.run(Turn("b", B, 8, 2, [1, 2, 3]))
    assert caught.value.request_ids == ("b",)


def test_a_step_that_was_announced_and_never_saved_leaves_no_rows(make):
    stage = make()
    stage.run(Turn("o", C, 0, 4, [1]))
    stage.announce(Turn("a", A, 0, 4, [1]), finished=["o"])
    b = branch(A, 4, 2)
    with pytest.raises(OmniPrefixCacheUnmatchError, match="never saved") as caught:
        stage.run(Turn("a", A, 4, 1, [1, 2]), Turn("b", b, 4, 1, [1, 3]), Turn("c", C, 0, 2, [5]))
    assert caught.value.request_ids == ("a", "b")
    assert_rows(caught.value.outputs, "c", C[:2])


# Preemption -----------------------------------------------------------------------------------------------------------

WAYS = pytest.mark.parametrize("way", [{"resumed": True}, {"as_new": True}], ids=["resumed", "as new"])


@WAYS
@both_kinds
@pytest.mark.parametrize("hit_blocks", [0, 1, 2])
def test_resumed_with_a_hit_smaller_than_what_was_handed_on(make, way, policy, hit_blocks):
    stage = make(policy=policy)
    stage.run(Turn("a", A, 0, 10, [1, 2, 3]))
    stage.run(Turn("n", C, 0, 2, [3]))
    hit = hit_blocks * BLOCK
    blocks = [*[1, 2][:hit_blocks], 10, 11, 12]
    # Rows that it has already are computed again and stay here; then the rest.
    seven = stage.run(Turn("a", A, hit, 9 - hit, blocks, **way))
    assert_rows(seven, "a", [])
    assert_rows(stage.run(Turn("a", A, 9, 3, blocks)), "a", A[10:12])
    assert_rows(stage.run(Turn("a", A, 12, 1, [*blocks, 13])), "a", A[12:13])
    # What was computed again is in the new blocks.
    b = branch(A, 12, 2)
    assert_rows(stage.run(Turn("b", b, 12, 1, [*blocks[:3], 14])), "b", b[:13])


@WAYS
@both_kinds
def test_resumed_with_a_hit_larger_than_what_was_handed_on(make, way, policy):
    stage = make(policy=policy)
    a = A
    stage.run(Turn("a", a, 0, 3, [1]))
    p = branch(a, 12, 2)
    stage.run(Turn("p", p, 0, 12, [5, 6, 7]))
    outputs = stage.run(Turn("a", a, 12, 2, [5, 6, 7, 8], **way))
    assert_rows(outputs, "a", a[3:14])
    assert_rows(stage.run(Turn("a", a, 14, 1, [5, 6, 7, 8])), "a", a[14:15])


@WAYS
def test_resumed_with_a_hit_of_exactly_what_was_handed_on(make, way):
    stage = make()
    stage.run(Turn("a", A, 0, 8, [1, 2]))
    assert_rows(stage.run(Turn("a", A, 8, 3, [1, 2, 9], **way)), "a", A[8:11])


@WAYS
def test_preempted_twice_before_it_gets_anywhere(make, way):
    stage = make()
    stage.run(Turn("a", A, 0, 10, [1, 2, 3]))
    assert_rows(stage.run(Turn("a", A, 0, 4, [4], **way)), "a", [])
    assert_rows(stage.run(Turn("a", A, 0, 4, [5], **way)), "a", [])
    assert_rows(stage.run(Turn("a", A, 4, 8, [5, 6, 7])), "a", A[10:12])


@WAYS
def test_resumed_in_the_step_that_computes_what_it_hits(make, way):
    stage = make()
    stage.run(Turn("a", A, 0, 2, [1]))
    p = branch(A, 8, 2)
    outputs = stage.run(Turn("a", A, 8, 1, [5, 6, 7], **way), Turn("p", p, 0, 9, [5, 6, 8]))
    assert_rows(outputs, "a", A[2:9])
    assert_rows(outputs, "p", p[:9])


@WAYS
def test_resumed_into_recycled_blocks(make, way):
    stage = make()
    stage.run(Turn("a", A, 0, 8, [1, 2]))
    stage.run(Turn("n", C, 0, 8, [1, 2]))
    assert_rows(stage.run(Turn("a", A, 0, 9, [2, 1, 3], **way), finished=["n"]), "a", A[8:9])
    b = branch(A, 8, 2)
    assert_rows(stage.run(Turn("b", b, 8, 1, [2, 1, 4])), "b", b[:9])


def test_others_go_on_beside_one_that_is_resumed(make):
    """Their new blocks are told in the same lists."""
    stage = make()
    stage.occupy(7, 8, name=9)
    stage.run(Turn("a", A, 0, 4, [1]), Turn("b", B, 0, 4, [2]), finished=[stage.ended])
    outputs = stage.run(Turn("b", B, 4, 4, [2, 7]), Turn("a", A, 4, 4, [1, 8], resumed=True), Turn("c", C, 0, 1, [9]))
    assert_rows(outputs, "a", A[4:8])
    assert_rows(outputs, "b", B[4:8])
    d, e = branch(A, 8, 4), branch(B, 8, 5)
    outputs = stage.run(Turn("d", d, 8, 1, [1, 8, 10]), Turn("e", e, 8, 1, [2, 7, 11]))
    assert_rows(outputs, "d", d[:9])
    assert_rows(outputs, "e", e[:9])


def test_left_out_of_a_step_and_back(make):
    """Running requests that a step has no tokens for are no restarts."""
    stage = make()
    stage.run(Turn("a", A, 0, 4, [1]), Turn("b", B, 0, 4, [2]))
    assert_rows(stage.run(Turn("b", B, 4, 1, [2, 3])), "b", B[4:5])
    outputs = stage.run(Turn("a", A, 4, 1, [1, 4]), Turn("b", B, 5, 1, [2, 3]))
    assert_rows(outputs, "a", A[4:5])
    assert_rows(outputs, "b", B[5:6])


def test_in_the_batch_and_not_scheduled(make):
    stage = make()
    stage.run(Turn("a", A, 0, 4, [1]), Turn("b", B, 0, 5, [2, 3]))
    outputs = stage.run(Turn("a", A, 4, 0, [1], left_alone=True), Turn("b", B, 5, 3, [2, 3]))
    assert_rows(outputs, "a", [])
    assert_rows(outputs, "b", B[5:8])
    assert_rows(stage.run(Turn("a", A, 4, 2, [1, 4]), Turn("b", B, 8, 1, [2, 3, 5])), "a", A[4:6])


# Chunks ---------------------------------------------------------------------------------------------------------------


@both_kinds
@pytest.mark.parametrize("length", [8, 6, 1])
def test_the_next_chunk_of_a_live_request(make, policy, length):
    """Its id is among the new ones again, with what it computed itself, to the end of a block or not."""
    stage = make(policy=policy)
    blocks = list(range(1, 2 + (length - 1) // BLOCK))
    assert_rows(stage.run(Turn("a", A, 0, length, blocks)), "a", A[:length])
    stage.run(Turn("other", C, 0, 3, [20]))
    more = [*blocks, 10, 11]
    assert_rows(stage.run(Turn("a", A, length, 5, more, as_new=True)), "a", A[length : length + 5])
    assert_rows(stage.run(Turn("a", A, length + 5, 1, more)), "a", A[length + 5 : length + 6])
    hit = (length + 6) // BLOCK
    b = branch(A, hit * BLOCK, 2)
    assert_rows(stage.run(Turn("b", b, hit * BLOCK, 1, [*more[:hit], 30])), "b", b[: hit * BLOCK + 1])


def test_a_chunk_after_rows_that_a_hit_had(make):
    stage = make()
    stage.run(Turn("a", A, 0, 8, [1, 2]))
    b = branch(A, 8, 2)
    stage.run(Turn("b", b, 8, 3, [1, 2, 3]))
    assert_rows(stage.run(Turn("b", b, 11, 4, [1, 2, 3, 4], as_new=True)), "b", b[11:15])


def test_a_block_shared_by_two_chunks_is_no_recycled_block(make):
    stage = make()
    stage.run(Turn("a", A, 0, 6, [1, 2]))
    stage.run(Turn("a", A, 6, 2, [1, 2], as_new=True))
    b = branch(A, 8, 2)
    assert_rows(stage.run(Turn("b", b, 8, 1, [1, 2, 3])), "b", b[:9])


# Ids ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gap", [0, 1])
def test_an_id_used_again_is_another_request(make, gap):
    """Also in the same scheduler output that tells of its end."""
    stage = make()
    stage.run(Turn("a", A, 0, 10, [1, 2, 3]))
    finished = ["a"]
    if gap:
        stage.run(Turn("x", C, 0, 1, [9]), finished=finished)
        finished = ["x"]
    b = branch(A, 8, 2)
    assert_rows(stage.run(Turn("a", b, 8, 3, [1, 2, 4]), finished=finished), "a", b[:11])


def test_a_late_consumer_of_a_finished_request_whose_id_is_used_again(make):
    stage = make()
    stage.run(Turn("o", A, 0, 8, [1, 2]))
    b = branch(A, 8, 2)
    first = stage.step(Turn("a", b, 8, 2, [1, 2, 3]))
    second = stage.step(Turn("a", C, 0, 12, [1, 2, 3]), finished=["a", "o"])
    assert_rows(stage.take(second), "a", C[:12])
    assert_rows(stage.take(first), "a", b[:10])


def test_an_end_that_is_told_one_step_late(make):
    """vLLM frees blocks one step before `finished_req_ids` says so."""
    stage = make()
    stage.run(Turn("a", A, 0, 8, [1, 2]))
    b = branch(A, 8, 2)
    step = stage.step(Turn("b", b, 8, 1, [1, 2, 3]), finished=["a"])
    stage.run(Turn("n", C, 0, 12, [3, 2, 1]))
    assert_rows(stage.run(Turn("n", C, 12, 1, [3, 2, 1, 4]), finished=["b"]), "n", C[12:13])
    assert_rows(stage.take(step), "b", b[:9])


def test_the_end_of_a_request_that_nobody_knows_changes_nothing(make):
    stage = make()
    assert_rows(stage.run(Turn("a", A, 0, 4, [1]), finished=["ghost"]), "a", A[:4])


# Drafts ---------------------------------------------------------------------------------------------------------------


def draft(contents, start, accepted, drafts):
    """The contents of a step that computes one token and `drafts` more, of which only `accepted` are right."""
    wrong = [10**6 + position for position in range(start + 1 + accepted, start + 1 + drafts)]
    return [*contents[: start + 1 + accepted], *wrong]


@both_kinds
def test_rows_of_rejected_drafts_are_handed_on_anew(make, policy):
    stage = make(policy=policy)
    stage.run(Turn("a", A, 0, 6, [1, 2]))
    rows = draft(A, 6, 1, 3)
    assert_rows(stage.run(Turn("a", rows, 6, 4, [1, 2, 3], drafts=3)), "a", rows[6:10])
    assert_rows(stage.run(Turn("a", A, 8, 1, [1, 2, 3])), "a", A[8:9])
    assert_rows(stage.run(Turn("a", A, 9, 3, [1, 2, 3], drafts=2)), "a", A[9:12])
    b = branch(A, 12, 2)
    assert_rows(stage.run(Turn("b", b, 12, 1, [1, 2, 3, 4])), "b", b[:13])


def test_drafts_rejected_over_the_edge_of_a_block(make):
    stage = make()
    stage.run(Turn("a", A, 0, 3, [1]))
    rows = draft(A, 3, 0, 4)
    stage.run(Turn("a", rows, 3, 5, [1, 2], drafts=4))
    assert_rows(stage.run(Turn("a", A, 4, 1, [1, 2])), "a", A[4:5])
    assert_rows(stage.run(Turn("a", A, 5, 3, [1, 2])), "a", A[5:8])
    b = branch(A, 8, 2)
    assert_rows(stage.run(Turn("b", b, 8, 1, [1, 2, 3])), "b", b[:9])


def test_rows_behind_a_roll_back_are_not_there_until_they_are_computed_anew(make):
    """A hit on the block of rejected drafts would be vLLM's fault. It is an error here and not a wrong row."""
    stage = make()
    stage.run(Turn("a", draft(A, 0, 0, 3), 0, 4, [1], drafts=3))
    stage.run(Turn("a", A, 1, 1, [1]))
    b = branch(A, 4, 2)
    with pytest.raises(OmniPrefixCacheUnmatchError, match="never saved"):
        stage.run(Turn("b", b, 4, 1, [1, 2]))


@WAYS
@pytest.mark.parametrize("hit_blocks", [0, 1, 2])
def test_preempted_after_drafts_were_rejected(make, way, hit_blocks):
    """The rows of rejected drafts were handed on, and nothing says so but the number of tokens it has."""
    stage = make()
    stage.run(Turn("a", A, 0, 6, [1, 2], num_tokens=6))
    rows = draft(A, 6, 1, 3)
    stage.run(Turn("a", rows, 6, 4, [1, 2, 3], drafts=3, num_tokens=7))
    # It has tokens 0 to 8, the row of the last one is not computed.
    hit = hit_blocks * BLOCK
    blocks = [*[1, 2][:hit_blocks], 11, 12, 13]
    outputs = stage.run(Turn("a", A, hit, 9 - hit, blocks, num_tokens=9, **way))
    assert_rows(outputs, "a", A[8:9])
    assert_rows(stage.run(Turn("a", A, 9, 1, blocks)), "a", A[9:10])


@WAYS
def test_preempted_in_the_middle_of_a_second_roll_back(make, way):
    stage = make()
    stage.run(Turn("a", A, 0, 4, [1], num_tokens=4))
    stage.run(Turn("a", draft(A, 4, 0, 3), 4, 4, [1, 2], drafts=3, num_tokens=5))
    stage.run(Turn("a", draft(A, 5, 1, 2), 5, 3, [1, 2], drafts=2, num_tokens=6))
    outputs = stage.run(Turn("a", A, 4, 4, [1, 9], num_tokens=8, **way))
    assert_rows(outputs, "a", A[7:8])


def test_a_chunk_after_drafts_were_rejected(make):
    """The chunk's tokens stand where rows of drafts were handed on."""
    stage = make()
    stage.run(Turn("a", A, 0, 6, [1, 2]))
    stage.run(Turn("a", draft(A, 6, 0, 3), 6, 4, [1, 2, 3], drafts=3))
    assert_rows(stage.run(Turn("a", A, 7, 5, [1, 2, 3], as_new=True)), "a", A[7:12])


def test_preempted_after_a_chunk_and_rejected_drafts(make):
    """Its prompt is longer since the chunk came."""
    stage = make()
    stage.run(Turn("a", A, 0, 4, [1]))
    stage.run(Turn("a", A, 4, 5, [1, 2, 3], as_new=True))
    stage.run(Turn("a", draft(A, 9, 0, 2), 9, 3, [1, 2, 3], drafts=2, num_tokens=10))
    outputs = stage.run(Turn("a", A, 8, 3, [1, 2, 9], num_tokens=11, resumed=True))
    assert_rows(outputs, "a", A[10:11])


# Shapes of the cache --------------------------------------------------------------------------------------------------


def test_blocks_of_one_token(make):
    stage = make(block_size=1, num_blocks=8, max_blocks=9)
    stage.run(Turn("a", A, 0, 3, [0, 7, 1]))
    b = branch(A, 2, 2)
    assert_rows(stage.run(Turn("b", b, 2, 2, [0, 7, 2, 3])), "b", b[:4])


def test_one_block_for_everybody(make):
    stage = make(num_blocks=1)
    stage.run(Turn("a", A, 0, 4, [0]))
    assert_rows(stage.run(Turn("b", B, 0, 3, [0]), finished=["a"]), "b", B[:3])


def test_the_last_block_and_the_first_are_blocks_like_others(make):
    stage = make(num_blocks=16)
    stage.run(Turn("a", A, 0, 8, [15, 0]))
    b = branch(A, 8, 2)
    assert_rows(stage.run(Turn("b", b, 8, 1, [15, 0, 7])), "b", b[:9])


def test_a_step_as_large_as_a_staging_slot(make):
    stage = make(staging_capacity_tokens=12, num_blocks=8)
    assert_rows(stage.run(Turn("a", A, 0, 12, [1, 2, 3])), "a", A[:12])
    b = branch(A, 12, 2)
    assert_rows(stage.run(Turn("b", b, 12, 12, [1, 2, 3, 4, 5, 6])), "b", b[:24])


def test_a_hit_longer_than_the_largest_gather(make):
    """Of 16 rows on the device."""
    stage = make()
    stage.run(Turn("a", A, 0, 44, range(1, 12)))
    b = branch(A, 44, 2)
    assert_rows(stage.run(Turn("b", b, 44, 2, [*range(1, 12), 20])), "b", b[:46])


def test_two_caches_side_by_side(make):
    one, two = make(), make(num_blocks=8)
    one.run(Turn("a", A, 0, 8, [1, 2]))
    two.run(Turn("a", C, 0, 8, [1, 2]))
    b, d = branch(A, 8, 2), branch(C, 8, 4)
    first, second = one.step(Turn("b", b, 8, 1, [1, 2, 3])), two.step(Turn("b", d, 8, 1, [1, 2, 3]))
    assert_rows(two.take(second), "b", d[:9])
    assert_rows(one.take(first), "b", b[:9])
    one.manager.shutdown()
    assert_rows(two.run(Turn("b", d, 9, 1, [1, 2, 3])), "b", d[9:10])


def test_outputs_own_their_memory(make):
    """A row that a consumer keeps holds nothing but itself, whatever the step was."""
    stage = make()
    stage.run(Turn("a", A, 0, 8, [1, 2]), Turn("c", C, 0, 20, [3, 4, 5, 6, 7]))
    b = branch(A, 8, 2)
    for outputs, keys in (
        (stage.run(Turn("a", A, 8, 1, [1, 2, 8]), Turn("b", b, 8, 12, [1, 2, 9, 10, 11])), ("k",)),
        (stage.run(Turn("d", branch(A, 8, 4), 8, 12, [1, 2, 12, 13, 14]), keys=()), ()),
    ):
        tensors = [*outputs.hidden_states.values(), *outputs.mm_outputs["k"].values()]
        assert len(tensors) == (4 if keys else 2)
        for tensor in tensors:
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)


def test_outputs_may_be_changed_by_their_consumer(make):
    stage = make()
    outputs = stage.run(Turn("a", A, 0, 8, [1, 2]))
    outputs.hidden_states["a"].fill_(7)
    b = branch(A, 8, 2)
    outputs = stage.run(Turn("b", b, 8, 1, [1, 2, 3]), Turn("c", branch(A, 8, 3), 8, 1, [1, 2, 4]))
    outputs.hidden_states["b"].fill_(7)
    assert_rows(outputs, "c", branch(A, 8, 3)[:9])
    assert_rows(stage.run(Turn("d", branch(A, 8, 4), 8, 1, [1, 2, 5])), "d", branch(A, 8, 4)[:9])


@pytest.mark.parametrize("policy", [ModelCachePolicy(), DEFERRED], ids=["immediate", "deferred"])
def test_rows_saved_in_inference_mode_are_taken_outside_of_it(make, policy):
    """vLLM's runner is in it; whoever builds the outputs is not. Reads copied on either side can be completed."""
    stage = make(policy=policy)
    b = branch(A, 8, 2)
    with torch.inference_mode():
        stage.run(Turn("a", A, 0, 8, [1, 2]))
        step = stage.step(Turn("b", b, 8, 2, [1, 2, 3]))
        # Its rows are copied now, by the runner, where there is no thread.
        stage.run(Turn("n", C, 0, 8, [2, 1]), finished=["a"])
    assert_rows(stage.take(step), "b", b[:10])
    d = branch(C, 8, 4)
    with torch.inference_mode():
        step = stage.step(Turn("d", d, 8, 2, [2, 1, 4]))
    outputs = stage.take(step)
    assert_rows(outputs, "d", d[:10])
    outputs.hidden_states["d"].add_(1)
    # Keys that were opened in it are used outside of it.
    assert_rows(stage.run(Turn("d", d, 10, 1, [2, 1, 4])), "d", d[10:11])


def test_a_key_is_as_wide_as_it_is(make):
    assert WIDTH == 2  # what `zeros` of this file counts on
    stage = make()
    stage.run(Turn("a", A, 0, 4, [1]))
    b = branch(A, 4, 2)
    assert stage.run(Turn("b", b, 4, 1, [1, 2]), keys=()).mm_outputs["k"]["b"].tolist() == key_rows(b[:4])

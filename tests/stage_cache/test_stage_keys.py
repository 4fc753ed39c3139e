"""What a step's outputs are, key by key: rows, padded or not, of every shape and dtype, and everything else."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from scripted import WIDTH, Turn, assert_rows, branch, hidden_rows, key_rows, text, zeros

from vllm_neuron_cache.errors import OmniPrefixCacheUnmatchError
from vllm_neuron_cache.simulation.stage_schedule import row_values
from vllm_neuron_cache.stage_cache import HIDDEN_KEY, KeySpec, ModelCachePolicy
from vllm_neuron_cache.stage_cache.policy import DTYPE_BYTES

A, B, C = text(1), text(2), text(3)


def declare(*keys, **options):
    hidden = KeySpec(HIDDEN_KEY, (3,), "int64")
    return ModelCachePolicy(keys=(hidden, *(KeySpec(*key) for key in keys)), **options)


# Rows -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [None, declare(("k", (2,), "int64"))], ids=["discovered", "declared"])
@pytest.mark.parametrize("deferred", [False, True])
def test_keys_padded_and_not(make, policy, deferred):
    """A graph pads its outputs; what is put together of scheduled rows is not."""
    if deferred:
        keys = None if policy is None else policy.keys
        policy = ModelCachePolicy(keys=keys, deferred_keys={"k", "padded"} if keys is None else {"k"})
    stage = make(policy=policy)
    padded = torch.full((16, WIDTH), -5)
    padded[:11] = torch.from_numpy(row_values([*A[:9], *C[:2]], WIDTH))
    hidden = torch.full((16, 3), -5)
    hidden[:11] = torch.from_numpy(row_values([*A[:9], *C[:2]], 3))
    turns = Turn("a", A, 0, 9, [1, 2, 3]), Turn("c", C, 0, 2, [4])
    mm = {"padded" if policy is None or policy.keys is None else "k": padded}
    keys = () if "k" in mm else ("k",)
    outputs = stage.run(*turns, hidden=hidden, keys=keys, mm=mm, padded=16)
    for key in {"k", *mm}:
        assert outputs.mm_outputs[key]["a"].tolist() == key_rows(A[:9])
        assert outputs.mm_outputs[key]["c"].tolist() == key_rows(C[:2])
    b = branch(A, 8, 2)
    outputs = stage.run(Turn("b", b, 8, 1, [1, 2, 5]), keys={"k", *mm})
    assert_rows(outputs, "b", b[:9], keys={"k", *mm})


@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3), (2, 1, 3)])
def test_declared_rows_of_any_shape(make, shape):
    stage = make(policy=declare(("x", shape, "float32")))

    def rows(contents):
        return torch.tensor(contents, dtype=torch.float32).view(-1, *[1] * len(shape)).expand(-1, *shape).clone()

    stage.run(Turn("a", A, 0, 8, [1, 2]), keys=(), mm={"x": rows(A[:8])})
    b = branch(A, 8, 2)
    outputs = stage.run(Turn("b", b, 8, 3, [1, 2, 3]), keys=(), mm={"x": rows(b[8:11])})
    assert torch.equal(outputs.mm_outputs["x"]["b"], rows(b[:11]))
    # And where nobody computes the key.
    d = branch(A, 4, 4)
    outputs = stage.run(Turn("d", d, 4, 1, [1, 4]), keys=())
    assert torch.equal(outputs.mm_outputs["x"]["d"], rows(d[:4]))


@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
@pytest.mark.parametrize("deferred", [False, True])
def test_rows_of_every_dtype(make, dtype, deferred):
    """Also absent ones: the recycled block's new tenant has no rows of the key."""
    stage = make(policy=declare(("x", (3,), dtype), deferred_keys={"x"} if deferred else ()))
    torch_type = getattr(torch, dtype)
    assert torch.empty(1, dtype=torch_type).nbytes == DTYPE_BYTES[dtype]

    def rows(contents):
        values = torch.tensor(contents)[:, None] * torch.tensor([1, 3, 7]) % 2
        return values.to(torch.float32).to(torch_type)

    def same(found, expected):
        return found.dtype == torch_type and found.float().tolist() == expected.float().tolist()

    stage.run(Turn("a", A, 0, 8, [1, 2]), keys=(), mm={"x": rows(A[:8])})
    b = branch(A, 8, 2)
    outputs = stage.run(Turn("b", b, 8, 2, [1, 2, 3]), keys=(), mm={"x": rows(b[8:10])})
    assert same(outputs.mm_outputs["x"]["b"], rows(b[:10]))
    stage.run(Turn("c", C, 0, 5, [2, 9]), keys=(), finished=["a", "b"])
    stage.run(Turn("c", C, 5, 3, [2, 9]), keys=(), mm={"x": rows(C[5:8])})
    d = branch(C, 8, 4)
    outputs = stage.run(Turn("d", d, 8, 1, [2, 9, 3]), keys=(), mm={"x": rows(d[8:9])})
    found = outputs.mm_outputs["x"]["d"].float().tolist()
    assert found == [[0.0] * 3] * 8 + rows(d[8:9]).float().tolist()


def test_numbers_of_eight_bytes_keep_all_their_bits(make):
    stage = make(policy=declare(("i", (2,), "int64"), ("d", (2,), "float64")))
    integers = torch.tensor([[2**62 + 1, -(2**62) - 1], [-1, 2**32 + 5], [2**31, -(2**31) - 1], [0, 1]])
    doubles = torch.tensor([[1e300, -1e-300], [float("inf"), 5e-324], [0.1, -0.0], [1 / 3, 2.0**-1074]]).double()
    stage.run(Turn("a", A, 0, 4, [1]), keys=(), mm={"i": integers, "d": doubles})
    outputs = stage.run(Turn("b", branch(A, 4, 2), 4, 1, [1, 2]), keys=())
    assert torch.equal(outputs.mm_outputs["i"]["b"], integers)
    assert torch.equal(outputs.mm_outputs["d"]["b"].view(torch.int64), doubles.view(torch.int64))


def test_numbers_that_are_not_finite_come_back_bit_by_bit(make):
    stage = make(policy=declare(("x", (2,), "float32")))
    bits = torch.tensor([[0x7FC00001, -4194303], [0x7F800000, -8388608], [1, -2147483647], [0, -2147483648]])
    values = bits.to(torch.int32).view(torch.float32)
    stage.run(Turn("a", A, 0, 4, [1]), keys=(), mm={"x": values.clone()})
    outputs = stage.run(Turn("b", branch(A, 4, 2), 4, 1, [1, 2]), keys=())
    assert torch.equal(outputs.mm_outputs["x"]["b"].view(torch.int32), bits.to(torch.int32))


@pytest.mark.parametrize("deferred", [False, True])
def test_rows_that_do_not_lie_one_after_another(make, deferred):
    stage = make(policy=ModelCachePolicy(deferred_keys={"x", "y"} if deferred else ()))

    def tensors(contents):
        rows = torch.from_numpy(row_values(contents, WIDTH))
        return {"x": rows.t().contiguous().t(), "y": torch.stack([rows, rows * 0], dim=2)[..., 0]}

    stage.run(Turn("a", A, 0, 8, [1, 2]), keys=(), mm=tensors(A[:8]))
    b = branch(A, 8, 2)
    outputs = stage.run(Turn("b", b, 8, 4, [1, 2, 3]), keys=(), mm=tensors(b[8:12]))
    assert_rows(outputs, "b", b[:12], keys=("x", "y"))


def test_rows_that_ask_for_gradients(make):
    stage = make(policy=ModelCachePolicy(deferred_keys={"late"}))

    def rows(contents):
        return torch.tensor(contents, dtype=torch.float32)[:, None].repeat(1, 2).requires_grad_()

    def step(turn):
        contents = turn.rows
        mm = {"now": rows(contents) * 1, "late": rows(contents), "note": rows([1, 2, 3])}
        return stage.step(turn, hidden=rows(contents).detach(), keys=(), mm=mm)

    stage.take(step(Turn("a", A, 0, 8, [1, 2])))
    b = branch(A, 8, 2)
    outputs = stage.take(step(Turn("b", b, 8, 1, [1, 2, 3])))
    for key in ("now", "late"):
        assert outputs.mm_outputs[key]["b"].tolist() == [[content] * 2 for content in b[:9]]
        assert not outputs.mm_outputs[key]["b"].requires_grad
    assert not outputs.mm_outputs["note"]["b"].requires_grad


def test_live_buffers_may_be_overwritten_after_the_save(make):
    """The harness overwrites them in every test; here the step is used much later, and its rows are hit as well."""
    stage = make(policy=ModelCachePolicy(deferred_keys={"late"}))
    live = {"now": torch.zeros(8, WIDTH, dtype=torch.int64), "late": torch.zeros(8, WIDTH, dtype=torch.int64)}
    note = torch.arange(3)
    steps = []
    for index in range(3):
        contents = text(10 + index)
        for tensor in live.values():
            tensor.copy_(torch.from_numpy(row_values(contents[:8], WIDTH)))
        note.fill_(index)
        turn = Turn(f"a{index}", contents, 0, 8, [2 * index + 1, 2 * index + 2])
        steps.append(stage.step(turn, mm=live | {"note": [note, {"deep": note}]}))
    for tensor in (*live.values(), note):
        tensor.fill_(-9)
    for index, step in enumerate(steps):
        outputs = stage.take(step)
        assert_rows(outputs, f"a{index}", text(10 + index)[:8], keys=("k", "now", "late"))
        first, rest = outputs.mm_outputs["note"][f"a{index}"]
        assert first.tolist() == rest["deep"].tolist() == [index] * 3
        b = branch(text(10 + index), 8, 20 + index)
        outputs = stage.run(Turn(f"b{index}", b, 8, 1, [2 * index + 1, 2 * index + 2, 30 + index]), mm={})
        assert outputs.mm_outputs["late"][f"b{index}"].tolist() == key_rows(b[:8])


# Keys that come and go ------------------------------------------------------------------------------------------------


def test_rows_of_earlier_steps_for_a_key_that_the_step_has_not(make):
    stage = make()
    stage.run(Turn("a", A, 0, 8, [1, 2]))
    b = branch(A, 8, 2)
    outputs = stage.run(Turn("b", b, 8, 4, [1, 2, 3]), Turn("c", C, 0, 1, [4]), keys=())
    assert outputs.hidden_states["b"].tolist() == hidden_rows(b[:12])
    assert outputs.mm_outputs["k"]["b"].tolist() == key_rows(b[:8])
    assert "c" not in outputs.mm_outputs["k"]


def test_a_key_that_comes_first_in_the_step_of_the_hit(make):
    stage = make()
    stage.run(Turn("a", A, 0, 8, [1, 2]), keys=())
    b = branch(A, 8, 2)
    outputs = stage.run(Turn("b", b, 8, 2, [1, 2, 3]), Turn("a", A, 8, 1, [1, 2, 4]))
    assert outputs.mm_outputs["k"]["b"].tolist() == zeros(8) + key_rows(b[8:10])
    assert outputs.mm_outputs["k"]["a"].tolist() == key_rows(A[8:9])
    assert outputs.hidden_states["b"].tolist() == hidden_rows(b[:10])


def test_a_key_that_comes_first_in_the_step_of_the_hit_and_is_computed_in_it(make):
    stage = make()
    stage.run(Turn("c", C, 0, 1, [9]), keys=())
    b = branch(A, 4, 2)
    outputs = stage.run(Turn("a", A, 0, 5, [1, 2]), Turn("b", b, 4, 2, [1, 3]))
    assert_rows(outputs, "b", b[:6])


def test_hidden_states_that_the_step_of_the_hit_has_not(make):
    stage = make()
    stage.run(Turn("a", A, 0, 8, [1, 2]))
    b = branch(A, 8, 2)
    outputs = stage.run(Turn("b", b, 8, 4, [1, 2, 3]), hidden=None)
    assert outputs.hidden_states["b"].tolist() == hidden_rows(b[:8])
    assert outputs.mm_outputs["k"]["b"].tolist() == key_rows(b[:12])


def test_no_hidden_states_at_all(make):
    stage = make()
    outputs = stage.run(Turn("a", A, 0, 8, [1, 2]), hidden=None)
    assert outputs.hidden_states is None
    b = branch(A, 8, 2)
    outputs = stage.run(Turn("b", b, 8, 1, [1, 2, 3]), hidden=None)
    assert outputs.hidden_states is None
    assert outputs.mm_outputs["k"]["b"].tolist() == key_rows(b[:9])


def test_a_policy_that_does_not_need_hidden_states(make):
    stage = make(policy=ModelCachePolicy(needs_full_hidden_states=False))
    stage.run(Turn("a", A, 0, 8, [1, 2]))
    b = branch(A, 8, 2)
    outputs = stage.run(Turn("b", b, 8, 1, [1, 2, 3]))
    assert outputs.hidden_states is None
    assert outputs.mm_outputs["k"]["b"].tolist() == key_rows(b[:9])
    assert set(stage.manager._store.specs) == {"k"}


@pytest.mark.parametrize("change", [lambda rows: rows.to(torch.int32), lambda rows: rows[:, :1]])
def test_a_key_that_changes_its_dtype_or_width(make, change):
    """Nobody gets rows of two kinds put together, nor rows of the cache that are of another kind: who needs both
    fails, who needs the step's own alone has them."""
    stage = make()
    stage.run(Turn("a", A, 0, 8, [1, 2]))
    b, d = branch(A, 8, 2), branch(A, 8, 4)
    rows = {"k": change(torch.from_numpy(row_values([*b[8:12], *C[:4]], WIDTH)))}
    step = stage.step(Turn("b", b, 8, 4, [1, 2, 3]), Turn("c", C, 0, 4, [4]), keys=(), mm=rows)
    with pytest.raises(OmniPrefixCacheUnmatchError, match=r"request b: k: .*\[2\] torch.int64.*computed") as caught:
        stage.take(step)
    assert caught.value.request_ids == ("b",)
    kept = caught.value.outputs
    assert torch.equal(kept.mm_outputs["k"]["c"], change(torch.from_numpy(row_values(C[:4], WIDTH))))
    assert kept.hidden_states["c"].tolist() == hidden_rows(C[:4])
    # Rows from before are there, those of that step are not, and the key goes on as it was.
    assert_rows(stage.run(Turn("d", d, 8, 1, [1, 2, 5]), finished=["b"]), "d", d[:9])
    e = branch(C, 4, 5)
    with pytest.raises(OmniPrefixCacheUnmatchError) as caught:
        stage.run(Turn("e", e, 4, 1, [4, 6]), Turn("f", B, 0, 2, [7]))
    assert caught.value.request_ids == ("e",)
    assert_rows(caught.value.outputs, "f", B[:2])
    # The next tenant's rows are whole again.
    stage.run(Turn("g", B, 0, 4, [4]), finished=["c", "e", "f"])
    h = branch(B, 4, 8)
    assert_rows(stage.run(Turn("h", h, 4, 1, [4, 6])), "h", h[:5])


def test_a_declared_key_of_another_first_dimension_fails_the_step_and_no_other(make):
    stage = make(policy=declare(("k", (2,), "int64")))
    stage.run(Turn("a", A, 0, 8, [1, 2]))
    b = branch(A, 8, 2)
    step = stage.step(Turn("b", b, 8, 4, [1, 2, 3]), keys=(), mm={"k": torch.zeros(3, 2, dtype=torch.int64)})
    with pytest.raises(OmniPrefixCacheUnmatchError, match=r"k: it is \[3, 2\] and the step has 4 rows") as caught:
        stage.take(step)
    assert caught.value.request_ids == ("b",)
    # The rows of that step are gone for hits, and those before it are not.
    d, e = branch(A, 8, 4), branch(b, 12, 5)
    assert_rows(stage.run(Turn("d", d, 8, 1, [1, 2, 4]), finished=["b"]), "d", d[:9])
    with pytest.raises(OmniPrefixCacheUnmatchError, match=r"request e: .*lost"):
        stage.run(Turn("e", e, 12, 1, [1, 2, 3, 5]))


@pytest.mark.parametrize("value", [None, [1, 2], {"x": 1}, "text", 7, torch.tensor(3)])
def test_a_declared_key_that_is_no_tensor_of_rows(make, value):
    stage = make(policy=declare(("k", (2,), "int64")))
    step = stage.step(Turn("a", A, 0, 4, [1]), keys=(), mm={"k": value})
    with pytest.raises(OmniPrefixCacheUnmatchError, match="k: it is "):
        stage.take(step)
    assert_rows(stage.run(Turn("a", A, 4, 1, [1, 2])), "a", A[4:5])


def test_hidden_states_with_too_few_rows_fail_the_step_and_no_other(make):
    stage = make()
    step = stage.step(Turn("a", A, 0, 4, [1]), hidden=torch.zeros(3, 3, dtype=torch.int64), mm={"note": "n"})
    with pytest.raises(OmniPrefixCacheUnmatchError, match="the step has 4 rows") as caught:
        stage.take(step)
    assert caught.value.request_ids == ("a",)
    assert not any(caught.value.outputs.mm_outputs.values())
    assert_rows(stage.run(Turn("b", B, 0, 4, [2]), finished=["a"]), "b", B[:4])


def test_the_name_of_the_hidden_states_belongs_to_them(make):
    stage = make()
    step = stage.step(Turn("a", A, 0, 4, [1]), mm={HIDDEN_KEY: torch.zeros(4, 2)})
    with pytest.raises(OmniPrefixCacheUnmatchError, match="name belongs to the hidden states"):
        stage.take(step)
    assert_rows(stage.run(Turn("a", A, 4, 1, [1, 2])), "a", A[4:5])


# What is no row per token ---------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    first: object
    second: object


def test_leftovers_are_passed_through_as_they_are(make):
    stage = make()
    reference = torch.arange(6.0).view(3, 2)
    leftovers = {
        "codes.ref": reference,
        "list": [reference, 1, "two", None],
        "dict": {"deep": {"er": reference}, 3: [reference]},
        "tuple": (reference, (reference,)),
        "named": Pair(reference, [reference]),
        "scalar": torch.tensor(5),
        "empty": torch.zeros(0, 4),
        "ids": torch.arange(5),
        "text": "words",
        "none": None,
        "number": 3.5,
    }
    outputs = stage.run(Turn("a", A, 0, 5, [1, 2]), Turn("c", C, 0, 2, [3]), mm=dict(leftovers))
    for req_id in ("a", "c"):
        found = {key: outputs.mm_outputs[key][req_id] for key in leftovers}
        assert torch.equal(found["codes.ref"], reference)
        assert torch.equal(found["list"][0], reference) and found["list"][1:] == [1, "two", None]
        assert torch.equal(found["dict"]["deep"]["er"], reference) and torch.equal(found["dict"][3][0], reference)
        assert isinstance(found["tuple"], tuple) and torch.equal(found["tuple"][1][0], reference)
        assert type(found["named"]) is Pair and torch.equal(found["named"].second[0], reference)
        assert found["scalar"].item() == 5 and found["scalar"].shape == ()
        assert found["empty"].shape == (0, 4)
        assert found["ids"].tolist() == [0, 1, 2, 3, 4]
        assert (found["text"], found["none"], found["number"]) == ("words", None, 3.5)
    assert set(stage.manager._store.specs) == {HIDDEN_KEY, "k"}


@pytest.mark.parametrize("array", [False, True])
def test_leftovers_are_shared_with_nobody(make, array):
    """Neither between requests nor with the model, however deep they lie."""
    stage = make()
    reference = np.arange(3) if array else torch.arange(3)
    value = {"deep": [reference, (reference,)]}
    step = stage.step(Turn("a", A, 0, 5, [1, 2]), Turn("c", C, 0, 2, [3]), mm={"note": value, "flat": reference})
    reference[:] = -1
    value["deep"].append("later")
    outputs = stage.take(step).mm_outputs
    outputs["note"]["a"]["deep"][0][:] = 7
    outputs["note"]["a"]["deep"].append("more")
    outputs["flat"]["a"][:] = 7
    assert [outputs["note"]["a"]["deep"][1][0].tolist(), outputs["flat"]["c"].tolist()] == [[0, 1, 2]] * 2
    assert outputs["note"]["c"]["deep"][0].tolist() == [0, 1, 2] and len(outputs["note"]["c"]["deep"]) == 2


def test_an_array_with_a_row_per_token_is_no_tensor(make):
    """And passed through, like everything that is none; it fails nobody."""
    stage = make()
    array = np.arange(8).reshape(4, 2)
    outputs = stage.run(Turn("a", A, 0, 4, [1]), mm={"array": array})
    assert_rows(outputs, "a", A[:4])
    assert outputs.mm_outputs["array"]["a"].tolist() == array.tolist()


def test_a_declared_policy_leaves_a_tensor_with_a_row_per_token_by_chance_alone(make):
    """One reference for the whole batch, whose first dimension is the step's, or the padded one."""
    stage = make(policy=declare(("k", (2,), "int64")))
    for rows, padded in ((7, 7), (8, 8)):
        reference = torch.arange(rows * 2).view(rows, 2)
        turns = Turn(f"a{rows}", A, 0, 4, [1]), Turn(f"c{rows}", C, 0, 3, [2])
        outputs = stage.run(*turns, mm={"codes.ref": reference}, padded=padded)
        for turn in turns:
            assert torch.equal(outputs.mm_outputs["codes.ref"][turn.req_id], reference)
            assert_rows(outputs, turn.req_id, turn.rows)
        stage.run(Turn("x", B, 0, 1, [9]), finished=[turn.req_id for turn in turns])


def test_a_discovered_key_that_turns_out_to_have_no_row_per_token(make, logged):
    """It is passed through from then on, also where its first dimension is the step's again."""
    stage = make()
    reference = torch.arange(8).view(4, 2)
    stage.run(Turn("a", A, 0, 4, [1]), mm={"ref": reference})
    b = branch(A, 4, 2)
    outputs = stage.run(Turn("b", b, 4, 2, [1, 2]), mm={"ref": reference})
    assert torch.equal(outputs.mm_outputs["ref"]["b"], reference)
    assert_rows(outputs, "b", b[:6])
    (message,) = logged
    assert "no row per token after all" in message and "Declare the keys" in message
    logged.clear()
    outputs = stage.run(Turn("c", C, 0, 4, [3]), mm={"ref": reference})
    assert torch.equal(outputs.mm_outputs["ref"]["c"], reference)
    d = branch(A, 4, 4)
    outputs = stage.run(Turn("d", d, 4, 1, [1, 5]))
    assert "ref" not in outputs.mm_outputs
    assert logged == [], "said once"


def test_a_read_that_waits_while_its_key_is_demoted(make):
    stage = make()
    reference = torch.arange(8).view(4, 2)
    stage.run(Turn("a", A, 0, 4, [1]), mm={"ref": reference})
    b = branch(A, 4, 2)
    first = stage.step(Turn("b", b, 4, 1, [1, 2]))
    outputs = stage.run(Turn("b", b, 5, 1, [1, 2]), mm={"ref": reference})
    assert torch.equal(outputs.mm_outputs["ref"]["b"], reference)
    assert_rows(stage.take(first), "b", b[:5])


def test_vectors_are_not_discovered(make):
    """Too many things are as long as a step by chance; declare them."""
    stage = make()
    outputs = stage.run(Turn("a", A, 0, 4, [1]), Turn("c", C, 0, 2, [2]), mm={"ids": torch.arange(6)})
    assert outputs.mm_outputs["ids"]["a"].tolist() == outputs.mm_outputs["ids"]["c"].tolist() == list(range(6))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(4, 2, dtype=torch.complex64),
        torch.zeros(4, 0),
        torch.zeros(4, 2, 0),
        torch.zeros(4, 2, dtype=torch.uint16),
    ],
    ids=["complex", "no column", "no element", "uint16"],
)
def test_rows_that_cannot_be_kept_are_handed_on(make, tensor):
    """A tensor that nobody declared, of a kind that the stores do not keep, costs nobody else anything."""
    stage = make()
    outputs = stage.run(Turn("a", A, 0, 3, [1]), Turn("c", C, 0, 1, [2]), mm={"odd": tensor})
    assert_rows(outputs, "a", A[:3])
    assert outputs.mm_outputs["odd"]["a"].tolist() in (tensor.tolist(), tensor[:3].tolist())
    b = branch(C, 4, 2)
    stage.run(Turn("c", C, 1, 3, [2]))
    assert_rows(stage.run(Turn("b", b, 4, 1, [2, 3])), "b", b[:5])


# Steps without rows ---------------------------------------------------------------------------------------------------


def test_a_step_without_tokens(make):
    stage = make()
    step = stage.step(mm={"note": [1]}, hidden=torch.zeros(0, 3))
    outputs = stage.manager.materialize(step, [])
    assert outputs.hidden_states is None and outputs.mm_outputs == {"note": {}}
    assert_rows(stage.run(Turn("a", A, 0, 4, [1])), "a", A[:4])


def test_a_step_without_tokens_and_requests_in_the_batch(make):
    stage = make()
    stage.run(Turn("a", A, 0, 5, [1, 2]))
    outputs = stage.run(Turn("a", A, 5, 0, [1, 2], left_alone=True), mm={"note": torch.arange(3)})
    assert outputs.hidden_states is None
    assert outputs.mm_outputs["note"]["a"].tolist() == [0, 1, 2]
    assert_rows(stage.run(Turn("a", A, 5, 1, [1, 2])), "a", A[5:6])


def test_a_step_with_leftovers_only(make):
    stage = make()
    stage.run(Turn("a", A, 0, 8, [1, 2]))
    b = branch(A, 8, 2)
    outputs = stage.run(
        Turn("b", b, 8, 2, [1, 2, 3]), Turn("c", C, 0, 1, [4]), hidden=None, keys=(), mm={"note": ["n"]}
    )
    assert outputs.mm_outputs["note"] == {"b": ["n"], "c": ["n"]}
    assert outputs.hidden_states["b"].tolist() == hidden_rows(b[:8])
    assert outputs.mm_outputs["k"] == {"b": outputs.mm_outputs["k"]["b"]}
    assert stage.manager.gauges().queued_writes == 0


def test_none_for_all_the_other_outputs(make):
    stage = make()
    turn = Turn("a", A, 0, 4, [1])
    stage.announce(turn)
    hidden = torch.from_numpy(row_values(A[:4], 3))
    step = stage.manager.save_outputs(hidden, None, num_tokens_unpadded=4, num_tokens_padded=4)
    outputs = stage.manager.materialize(step, ["a"])
    assert outputs.mm_outputs == {} and outputs.hidden_states["a"].tolist() == hidden_rows(A[:4])

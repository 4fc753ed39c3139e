"""What vLLM-Omni's runner gets of a step beside rows, and where rows are not to be had. Without vLLM-Omni."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_neuron_cache.errors import OmniPrefixCacheUnmatchError
from vllm_neuron_cache.integrations.vllm_omni.cache import RunnerStageCache
from vllm_neuron_cache.integrations.vllm_omni.leftovers import share_of, split_outputs
from vllm_neuron_cache.stage_cache import HostRowStore, KeySpec, ModelCachePolicy, PrefixCacheConfig

SIZES = (3, 4)
"""Tokens of the step, and with padding."""
VALUES = {
    "rows": torch.zeros(3, 2),
    "padded": torch.zeros(4, 2),
    "numbers": torch.zeros(3),
    "other": torch.zeros(5, 2),
    "list": [torch.zeros(3, 2)],
    "scalar": torch.tensor(1.0),
    "text": "abc",
}


def test_without_declarations_tensors_of_two_dimensions_go_by_their_shape():
    split = split_outputs(ModelCachePolicy(), VALUES, SIZES)
    assert set(split.rows) == {"rows", "padded"}
    assert set(split.rows) | set(split.leftovers) == set(VALUES)


def test_declared_keys_are_rows_whatever_they_are_and_nothing_else_is():
    policy = ModelCachePolicy(keys=(KeySpec("numbers", (), "float32"), KeySpec("other", (2,), "float32")))
    assert set(split_outputs(policy, VALUES, SIZES).rows) == {"numbers", "other"}


@pytest.mark.parametrize(
    ("value", "share"),
    [
        (torch.arange(3), torch.tensor([1, 2])),
        (torch.arange(4), torch.tensor([1, 2])),
        (torch.arange(5), torch.arange(5)),
        (torch.tensor(7), torch.tensor(7)),
    ],
)
def test_a_tensor_with_an_entry_per_token_is_dealt_out_and_others_are_not(value, share):
    got = share_of(value, slice(1, 3), SIZES)
    assert torch.equal(got, share) and got.untyped_storage().data_ptr() != value.untyped_storage().data_ptr()


def test_lists_are_whole_and_members_of_mappings_are_dealt_out():
    value = {"a": [torch.arange(3), "x"], "b": {"c": torch.arange(3)}}
    got = share_of(value, slice(0, 1), SIZES)
    assert torch.equal(got["a"][0], torch.arange(3)) and got["a"][1] == "x"
    assert torch.equal(got["b"]["c"], torch.tensor([0]))


# The cache ------------------------------------------------------------------------------------------------------------


class Runner:
    """Two requests, 8 blocks of 4. `step` does what the runner does, and returns the step's id."""

    def __init__(self, policy=None):
        table = SimpleNamespace(
            block_table=SimpleNamespace(cpu=torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)),
            blocks_per_kv_block=1,
            dcp_world_size=1,
            pcp_world_size=1,
            block_size=4,
        )

        class Tables:
            block_tables = (table,)

            def __getitem__(self, index):
                return table

        self.batch = SimpleNamespace(
            block_table=Tables(), req_ids=["a", "b"], num_computed_tokens_cpu=np.zeros(2, dtype=np.int32)
        )
        config = PrefixCacheConfig(num_blocks=8, block_size=4, staging_capacity_tokens=16)
        self.store = HostRowStore(config)
        self.cache = RunnerStageCache(config, self.batch, self.store)
        self.cache.register_policy(policy or ModelCachePolicy())

    def step(self, hits, counts, mm_outputs=None, *, finished=()):
        """`hits` has the tokens that are cached of each new request, None of one that goes on."""
        blocks = {"a": [1, 2], "b": [3, 4]}
        new = [
            SimpleNamespace(req_id=req_id, num_computed_tokens=hit, block_ids=(blocks[req_id],), prompt_token_ids=())
            for req_id, hit in zip(self.batch.req_ids, hits)
            if hit is not None
        ]
        num_scheduled = dict(zip(self.batch.req_ids, counts))
        self.cache.new_step_starts(
            SimpleNamespace(finished_req_ids=set(finished), scheduled_new_reqs=new, num_scheduled_tokens=num_scheduled)
        )
        self.batch.num_computed_tokens_cpu[:] = [hit or 0 for hit in hits]
        total = sum(counts)
        hidden = torch.arange(1.0, 2 * total + 1).reshape(total, 2)
        return self.cache.save_outputs(hidden, mm_outputs or {}, num_tokens_unpadded=total, num_tokens_padded=total)


def test_leftovers_are_those_of_the_step_and_survive_what_overwrites_them():
    runner = Runner()
    numbers = torch.arange(5)
    step = runner.step([0, 0], [2, 3], {"numbers": numbers, "list": [numbers]})
    numbers.zero_()
    runner.batch.req_ids = ["c"]
    outputs = runner.cache.materialize(step, ["b", "a"])
    assert outputs.mm_outputs["numbers"]["a"].tolist() == [0, 1]
    assert outputs.mm_outputs["numbers"]["b"].tolist() == [2, 3, 4]
    assert outputs.mm_outputs["list"]["b"][0].tolist() == [0, 1, 2, 3, 4]


def test_a_key_that_some_requests_have_rows_of_is_there_for_all():
    runner = Runner()
    runner.cache.discard_step(runner.step([0, 0], [4, 1], {"k": torch.ones(5, 3)}))
    # The step makes no rows of the key; one request has some of a hit.
    step = runner.step([4, 0], [1, 1], finished=["a", "b"])
    outputs = runner.cache.materialize(step, ["a", "b"])
    assert outputs.mm_outputs["k"]["a"].shape == (4, 3) and outputs.mm_outputs["k"]["b"].shape == (0, 3)
    assert len(outputs.hidden_states["a"]) == 5


def test_a_request_without_its_rows_is_named_and_gets_the_usual_shape():
    runner = Runner()
    runner.cache.discard_step(runner.step([0, 0], [4, 1], {"k": torch.ones(5, 3)}))
    runner.store.read = lambda *_: 1 / 0
    step = runner.step([4, 0], [2, 1], {"k": torch.ones(3, 3)}, finished=["a", "b"])
    outputs = runner.cache.materialize(step, ["a", "b"])
    assert outputs.hidden_states["a"].tolist() == [[0, 0], [0, 0]] and outputs.hidden_states["b"].tolist() == [[5, 6]]
    assert outputs.mm_outputs["k"]["a"].shape == (0, 3) and outputs.mm_outputs["k"]["b"].shape == (1, 3)
    ((req_id, text),) = runner.cache.take_failures(step).items()
    assert req_id == "a" and text.startswith("OmniPrefixCacheUnmatchError: ") and "division by zero" in text
    assert runner.cache.take_failures(step) == {}


def test_a_declared_key_that_is_no_rows_fails_all_and_leaves_no_key_that_lacks_requests():
    runner = Runner(ModelCachePolicy(keys=(KeySpec("k", (3,), "float32"),)))
    step = runner.step([0, 0], [1, 1], {"k": "nothing"})
    outputs = runner.cache.materialize(step, ["a", "b"])
    assert set(runner.cache.take_failures(step)) == {"a", "b"} and outputs.mm_outputs == {}
    assert {req_id: len(rows) for req_id, rows in outputs.hidden_states.items()} == {"a": 1, "b": 1}


def test_a_wrong_call_raises_and_costs_nothing():
    runner = Runner()
    step = runner.step([0, 0], [1, 1], {"n": torch.zeros(2)})
    with pytest.raises(OmniPrefixCacheUnmatchError, match="not of step"):
        runner.cache.materialize(step, ["x"])
    assert set(runner.cache.materialize(step, ["a"]).mm_outputs["n"]) == {"a"}
    assert runner.cache._steps == {}


def test_a_step_nobody_wants_leaves_nothing_behind():
    runner = Runner()
    runner.cache.discard_step(runner.step([0, 0], [1, 1], {"n": torch.zeros(2)}))
    assert runner.cache._steps == {}

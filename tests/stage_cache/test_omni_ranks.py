"""A stage on two tensor-parallel ranks, of which the first holds the mirror."""

import importlib.util
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from omni_stage import Prompt, Stage

if importlib.util.find_spec("vllm_omni") is None and Path(sys.prefix) != Path(__file__).parents[2] / ".cache/envs/omni":
    pytest.skip("needs vLLM-Omni; scripts/omni_env runs these", allow_module_level=True)

pytestmark = [
    pytest.mark.omni,
    pytest.mark.slow,
    # vLLM leaves the sockets of its workers open when an engine ends in this process.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

LONG = "describe what is seen in this picture in some detail " * 3


def cache_of(worker) -> str:
    return type(worker.model_runner.omni_prefix_cache).__name__


@pytest.fixture(scope="module")
def stage(omni_checkpoint):
    stage = Stage(omni_checkpoint, prefix_caching=True, stage_cache={}, num_ranks=2)
    yield stage
    stage.close()


def test_the_first_rank_alone_keeps_rows(stage):
    assert stage.core.model_executor.collective_rpc(cache_of) == ["RunnerStageCache", "NoneType"]


def test_a_hit_hands_on_what_was_handed_on_without_one(stage):
    (first,) = stage.serve([Prompt(1, LONG)])
    (hit,) = stage.serve([Prompt(1, LONG)])
    assert (first.num_cached, hit.num_cached) == (0, 160)
    assert hit.tokens == first.tokens
    assert torch.equal(hit.rows("hidden"), first.rows("hidden"))


def test_preempted_requests_get_each_row_once(stage):
    scheduler = stage.core.scheduler
    with mock.patch.object(scheduler, "_preempt_request", wraps=scheduler._preempt_request) as preempt:
        handed = stage.serve([Prompt(1, LONG), Prompt(2, LONG)], 70)
    assert preempt.called
    assert [len(one.rows("hidden")) for one in handed] == [244, 244]

"""A stage of vLLM-Omni with this cache hands on what it hands on without prefix caching, bit for bit."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from omni_stage import MANY_BLOCKS, Handed, Prompt, Stage, multimodal_outputs

from vllm_neuron_cache.errors import ConfigurationError
from vllm_neuron_cache.stage_cache import DeviceRowStore, HostRowStore, KeySpec, OmniPrefixCacheUnmatchError
from vllm_neuron_cache.stage_cache.delivery import DeliveryTracker

ROOT = Path(__file__).parents[2]

if importlib.util.find_spec("vllm_omni") is None and Path(sys.prefix) != ROOT / ".cache/envs/omni":
    pytest.skip("needs vLLM-Omni; scripts/omni_env runs these", allow_module_level=True)

pytestmark = [pytest.mark.omni, pytest.mark.slow]

LONG = "describe what is seen in this picture in some detail " * 3
PICTURE = Prompt(1, LONG)
SHORT = Prompt(1, LONG[:60] + "and nothing else " * 5)
OTHER = Prompt(2, LONG)
THIRD = Prompt(3, LONG)
TEXT = Prompt(None, LONG)

HITS = [
    [PICTURE],
    [PICTURE],  # all whole blocks
    [SHORT],  # some of them
    [OTHER],  # none: the picture comes first
    [THIRD, THIRD],  # the second hits what the first computes in the same step
    [TEXT],
    [SHORT, TEXT, PICTURE],  # old and new at once, in blocks that others had meanwhile
    [OTHER, PICTURE],
]
GROWING = [THIRD, OTHER]
"""Two that need more blocks in the end than there are."""
MANY_TOKENS = 70

ROWS, NUMBERS = "hidden_states.layer_0", "meta.sums"
"""Keys with a row, and with one number, per token."""
KEYS = [(ROWS, (8,), "float32"), (NUMBERS, (), "int64")]
LEFTOVERS = ("codes.ref", "embed.tts_bos")


def outputs_beside(hidden):
    return {
        "hidden_states": {"layers": {0: hidden[:, :8].clone()}},
        "meta": {"sums": (hidden.sum(-1) * 1000).long()},
        "codes": {"ref": torch.arange(14.0).reshape(7, 2)},
        "embed": {"tts_bos": [torch.ones(1, 4)]},
    }


def serve_all(stage: Stage) -> list[Handed]:
    return [handed for batch in HITS for handed in stage.serve(batch)]


def differences(handed: list[Handed], expected: list[Handed], keys) -> list[str]:
    """Which keys of which requests are not what they should be."""
    found = []
    for index, (one, other) in enumerate(zip(handed, expected, strict=True)):
        if one.tokens != other.tokens:
            found.append(f"tokens of {index}")
        for key in keys:
            rows, right = one.rows(key), other.rows(key)
            if rows.shape != right.shape or rows.dtype != right.dtype or not torch.equal(rows, right):
                found.append(f"{key} of {index}: {list(rows.shape)} for {list(right.shape)}")
    return found


@pytest.fixture(scope="module")
def beside():
    with multimodal_outputs(outputs_beside):
        yield


@pytest.fixture(scope="module")
def expected(omni_checkpoint, beside):
    """Without prefix caching, and with room for all: the hits, and then the two that grow."""
    stage = Stage(omni_checkpoint, prefix_caching=False, num_blocks=MANY_BLOCKS)
    handed = serve_all(stage), stage.serve(GROWING, MANY_TOKENS)
    stage.close()
    assert not any(one.num_cached for one in handed[0] + handed[1])
    return handed


@pytest.fixture(scope="module")
def theirs(omni_checkpoint, beside, expected):
    """With vLLM-Omni's own cache."""
    stage = Stage(omni_checkpoint, prefix_caching=True)
    handed = serve_all(stage), stage.serve(GROWING, MANY_TOKENS)
    assert type(stage.cache).__module__ == "vllm_omni.core.prefix_cache.manager"
    stage.close()
    return handed


@pytest.fixture(scope="module")
def engine(omni_checkpoint, beside, theirs):
    stage = Stage(omni_checkpoint, prefix_caching=True, stage_cache={})
    yield stage
    stage.close()


@pytest.fixture
def stage(engine):
    """With an empty cache of the host store that discovers its keys."""
    yield start_anew(engine)
    engine.cache.check_integrity()
    assert engine.cache.gauges().unused_steps == 0


def start_anew(stage: Stage, *, keys=None, deferred=(), needs_hidden=True, **settings) -> Stage:
    """As it would start with these settings, and a model that says this of its outputs."""
    runner = stage.runner
    runner.model.prefix_cache_keys = keys
    runner.model.deferred_prefix_cache_mm_keys = deferred
    runner.model.requires_full_prefix_cached_hidden_states = needs_hidden
    runner._snapshot_prefix_cache_model_policy(runner.model)
    runner.vllm_config.additional_config = {"vllm_neuron_cache": {"lane": "eager", "stage_cache": settings}}
    stage.reset()
    runner._omni_prefix_cache_cfg = runner._stage_cache_sizes(runner.kv_cache_config)
    runner._ensure_omni_prefix_cache()
    return stage


def test_hits_get_the_rows_that_were_not_computed(stage, expected, theirs):
    handed = serve_all(stage)
    assert differences(handed, expected[0], ["hidden", ROWS]) == []
    assert [one.num_cached for one in handed] == [one.num_cached for one in theirs[0]]
    cached = [one.num_cached for one in handed]
    assert cached[:6] == [0, 160, 96, 0, 0, 160] and any(cached[7:]), cached
    assert handed[4].first_step == handed[5].first_step, "they were not in one step"
    # A number per token is no row to a policy that goes by shape: as with vLLM-Omni's, those of the hit are not there.
    assert torch.equal(handed[1].payloads[0][NUMBERS], expected[0][1].payloads[0][NUMBERS][160:])


def test_what_has_no_row_per_token_arrives_as_without_prefix_caching(stage, expected):
    handed = serve_all(stage)
    for one, other in zip(handed, expected[0], strict=True):
        for payload in one.payloads:
            for key in LEFTOVERS:
                assert torch.equal(payload[key], other.payloads[0][key]), key


@pytest.mark.parametrize("store", ["host", "device"])
def test_declared_keys_are_whole_whatever_their_shape(engine, expected, store):
    stage = start_anew(engine, keys=KEYS, store=store)
    assert isinstance(stage.cache._store, DeviceRowStore if store == "device" else HostRowStore)
    assert stage.cache._store.specs[NUMBERS] == KeySpec(NUMBERS, (), "int64")
    assert differences(serve_all(stage), expected[0], ["hidden", ROWS, NUMBERS]) == []
    stage.cache.check_integrity()


@pytest.mark.parametrize("keys", [None, KEYS], ids=["discovered", "declared"])
def test_deferred_keys_are_whole(engine, expected, keys):
    stage = start_anew(engine, keys=keys, deferred=[ROWS])
    assert differences(serve_all(stage), expected[0], ["hidden", ROWS]) == []
    assert differences(stage.serve(GROWING, MANY_TOKENS), expected[1], ["hidden", ROWS]) == []
    stage.cache.check_integrity()


def test_hidden_states_that_the_next_stage_does_not_need_are_not_kept(engine, expected):
    stage = start_anew(engine, needs_hidden=False)
    handed = serve_all(stage)
    assert differences(handed, expected[0], [ROWS]) == []
    assert torch.equal(handed[1].payloads[0]["hidden"], expected[0][1].payloads[0]["hidden"][160:])
    assert set(stage.cache._store.specs) == {ROWS}


def test_a_tensor_that_is_not_declared_is_dealt_out_by_tokens(engine, expected):
    stage = start_anew(engine, keys=KEYS[1:])
    handed = serve_all(stage)
    assert differences(handed, expected[0], ["hidden", NUMBERS]) == []
    assert torch.equal(handed[1].payloads[0][ROWS], expected[0][1].payloads[0][ROWS][160:])


def test_a_preempted_request_gets_each_row_once(stage, expected, theirs):
    handed = stage.serve(GROWING, MANY_TOKENS)
    assert differences(handed, expected[1], ["hidden", ROWS]) == []
    assert [len(one.rows("hidden")) for one in handed] == [244, 244]
    # It happened: vLLM-Omni's own cache hands some rows on twice.
    assert max(len(one.rows("hidden")) for one in theirs[1]) > 244
    assert differences(theirs[1], expected[1], ["hidden"]) != []


def test_an_aborted_request_leaves_its_rows_and_its_id_to_another(stage, expected):
    stage.add("0", PICTURE, MANY_TOKENS)
    stage.step()
    stage.step()
    handed = stage.abort("0")
    assert torch.equal(torch.cat([payload["hidden"] for payload in handed]), expected[0][0].rows("hidden")[:176])
    # In the step that tells of the end of the first.
    (again,) = stage.serve([PICTURE])
    assert again.num_cached == 160
    assert differences([again], expected[0][:1], ["hidden", ROWS]) == []
    (other,) = stage.serve([TEXT])
    assert differences([other], expected[0][6:7], ["hidden", ROWS]) == []


def test_rows_that_cannot_be_had_end_that_request_alone(stage, expected):
    stage.serve([PICTURE])
    with mock.patch.object(stage.cache._store, "read", side_effect=RuntimeError("memory is gone")):
        failed, served = stage.serve([PICTURE, TEXT])
    assert failed.error.startswith(OmniPrefixCacheUnmatchError.__name__) and "memory is gone" in failed.error
    assert failed.tokens == ()
    assert served.error is None and differences([served], expected[0][6:7], ["hidden", ROWS]) == []
    assert stage.cache.counters.requests_failed == 1
    # Its blocks are not hit again, or everybody after it would fail as well.
    (again,) = stage.serve([PICTURE])
    assert (again.error, again.num_cached) == (None, 0)
    assert differences([again], expected[0][:1], ["hidden", ROWS]) == []


def test_the_comparison_sees_zeros_in_the_place_of_rows(stage, expected):
    read = type(stage.cache._store).read
    with mock.patch.object(type(stage.cache._store), "read", lambda *args: read(*args).zero_()):
        found = differences(serve_all(stage), expected[0], ["hidden", ROWS])
    assert any(text.startswith("hidden of 1:") for text in found) and any(text.startswith(ROWS) for text in found)
    assert not any("of 0" in text for text in found)  # which had no hit


def test_the_comparison_sees_rows_that_are_not_handed_on(stage, expected):
    with mock.patch.object(DeliveryTracker, "plan", lambda self, req_ids, starts, counts: starts):
        found = differences(serve_all(stage), expected[0], ["hidden"])
    assert "hidden of 1: [18, 128] for [178, 128]" in found


# Who has a cache, and who is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("owner", "attribute", "value", "message"),
    [
        ("", "speculative_config", object(), "speculative decoding: under asynchronous scheduling"),
        ("cache_config", "prefix_match_unit", 16, "lets a hit end within a block of 32"),
        ("model_config", "worker_type", "generation", "decodes codecs"),
        (
            "vllm_config",
            "kv_transfer_config",
            SimpleNamespace(is_kv_consumer=True, kv_role="kv_both"),
            "kv_role kv_both receives KV",
        ),
    ],
)
def test_what_cannot_be_mirrored_is_refused_at_start_up_with_this_caches_reasons(
    engine, owner, attribute, value, message
):
    runner = engine.runner
    with (
        mock.patch.object(getattr(runner, owner) if owner else runner, attribute, value),
        pytest.raises(OmniPrefixCacheUnmatchError, match=message),
    ):
        runner.initialize_metadata_builders(runner.kv_cache_config, runner._kernel_block_sizes)


def test_several_kv_groups_are_refused(engine):
    runner = engine.runner
    groups = SimpleNamespace(num_blocks=8, kv_cache_groups=runner.kv_cache_config.kv_cache_groups * 2)
    with pytest.raises(OmniPrefixCacheUnmatchError, match="2 groups of layers"):
        runner.initialize_metadata_builders(groups, runner._kernel_block_sizes)


def test_hidden_states_that_do_not_fit_are_refused_at_start_up(engine):
    with pytest.raises(ConfigurationError, match="host_bytes allows 1,000"):
        start_anew(engine, host_bytes=1000)


def test_other_tensor_parallel_ranks_run_without_the_mirror(engine, expected):
    rank = SimpleNamespace(rank_in_group=1)
    with mock.patch("vllm_neuron_cache.integrations.vllm_omni.runner.get_tp_group", return_value=rank):
        stage = start_anew(engine)
        assert stage.cache is None
        handed = serve_all(stage)
        assert [one.tokens for one in handed] == [one.tokens for one in expected[0]]
        assert len(handed[1].payloads[0]["hidden"]) == 15  # what it computed; nobody takes it from this rank
        # What the model makes of a whole prompt's rows after a step is in every rank's next one.
        with mock.patch.object(stage.runner.model, "has_postprocess", True, create=True):
            assert start_anew(engine).cache is not None


def test_an_engine_of_vllms_own_and_another_vllm_omni_are_refused(engine, omni_checkpoint):
    from vllm.engine.arg_utils import EngineArgs

    from vllm_neuron_cache.integrations.vllm_omni.activation import check_stage

    own = EngineArgs(model=str(omni_checkpoint), additional_config={"vllm_neuron_cache": {"stage_cache": {}}})
    with pytest.raises(ConfigurationError, match="this engine is vLLM's own"):
        own.create_engine_config()
    check_stage(engine.runner.vllm_config)
    with (
        mock.patch("vllm_omni.__version__", "0.31.0"),
        pytest.raises(ConfigurationError, match=r"0\.30\.x, and 0\.31\.0"),
    ):
        check_stage(engine.runner.vllm_config)


def test_a_runner_without_a_cache_to_replace_is_refused():
    from vllm_neuron_cache.integrations.vllm_omni.runner import compose

    with pytest.raises(ConfigurationError, match="use_v2_model_runner: false"):
        compose(type("RunnerOfAnotherKind", (), {}))


def test_the_scheduler_is_composed_over_classes_and_over_what_makes_them():
    from vllm_neuron_cache.integrations.vllm_omni.scheduler import StageCacheSchedulerMixin, compose

    class Base:
        def __init__(self, **kwargs):
            self.kwargs = kwargs

    assert compose(Base) is compose(Base) is compose(compose(Base))
    assert issubclass(compose(Base), StageCacheSchedulerMixin) and issubclass(compose(Base), Base)
    scheduler = compose(lambda **kwargs: Base(**kwargs))(block_size=32)
    assert type(scheduler) is compose(Base) and scheduler.kwargs == {"block_size": 32}

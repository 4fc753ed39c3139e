"""The public names, and what of them works without torch and vllm; sizes, policies, and what they refuse."""

import dataclasses
import inspect
import subprocess
import sys
from types import SimpleNamespace

import pytest

import vllm_neuron_cache.stage_cache as stage_cache
from vllm_neuron_cache import errors
from vllm_neuron_cache.errors import ConfigurationError, NeuronCacheError, OmniPrefixCacheUnmatchError
from vllm_neuron_cache.stage_cache import (
    HIDDEN_KEY,
    KeySpec,
    ModelCachePolicy,
    OmniPrefixCacheManager,
    PrefixCacheConfig,
    StageCacheOutputs,
)
from vllm_neuron_cache.stage_cache.interface import WriteState
from vllm_neuron_cache.stage_cache.policy import DTYPE_BYTES

# Of the peer, and ours beside them.
NAMES = {
    "FullAttentionGroupView",
    "ModelCachePolicy",
    "OmniPrefixCacheController",
    "OmniPrefixCacheManager",
    "OmniPrefixCacheStagingTimeoutError",
    "OmniPrefixCacheUnmatchError",
    "PrefixBlockPool",
    "PrefixCacheConfig",
    "StageCacheOutputs",
    "StagingBufferPool",
    "stage_prefix_cache_config",
}
WITHOUT_TORCH = NAMES - {"PrefixBlockPool", "StagingBufferPool"}


def test_every_name_can_be_imported():
    assert set(stage_cache.__all__) >= NAMES
    for name in stage_cache.__all__:
        value = getattr(stage_cache, name)
        if name != "HIDDEN_KEY":
            assert value.__name__ == name and value.__doc__
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        stage_cache.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("names", "absent"), [(sorted(stage_cache.__all__), {"vllm"}), (sorted(WITHOUT_TORCH), {"vllm", "torch"})]
)
def test_the_names_load_no_more_than_they_need(names, absent):
    program = f"import sys\nfrom vllm_neuron_cache.stage_cache import {', '.join(names)}\nprint(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert not absent & set(loaded.stdout.split())


def test_the_methods_are_called_as_the_peers_are():
    parameters = {
        "register_policy": ["policy"],
        "new_step_starts": ["scheduler_output"],
        "save_outputs": ["hidden_states", "mm_outputs", "num_tokens_unpadded", "num_tokens_padded"],
        "materialize": ["step_id", "req_ids"],
        "discard_step": ["step_id"],
        "shutdown": [],
    }
    for name, expected in parameters.items():
        signature = inspect.signature(getattr(OmniPrefixCacheManager, name))
        assert list(signature.parameters)[1:] == expected
    save = inspect.signature(OmniPrefixCacheManager.save_outputs)
    for name in ("num_tokens_unpadded", "num_tokens_padded"):
        assert save.parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
    assert StageCacheOutputs._fields == ("hidden_states", "mm_outputs")


def test_the_errors_are_of_one_family():
    assert issubclass(errors.OmniPrefixCacheStagingTimeoutError, errors.OmniPrefixCacheUnmatchError)
    assert issubclass(errors.OmniPrefixCacheUnmatchError, NeuronCacheError)
    error = OmniPrefixCacheUnmatchError("text", request_ids=["a", "b"], outputs=StageCacheOutputs(None, {}))
    assert error.request_ids == ("a", "b") and error.outputs == (None, {}) and str(error) == "text"
    assert (OmniPrefixCacheUnmatchError("x").request_ids, OmniPrefixCacheUnmatchError("x").outputs) == ((), None)


def test_a_view_and_a_configuration_of_different_block_sizes(make):
    view = make().manager._view
    with pytest.raises(OmniPrefixCacheUnmatchError, match="view has blocks of 4 slots and the configuration of 8"):
        OmniPrefixCacheManager(PrefixCacheConfig(num_blocks=2, block_size=8), view)


# Sizes ----------------------------------------------------------------------------------------------------------------


def test_the_sizes_have_the_peers_names_and_two_caps():
    fields = [field.name for field in dataclasses.fields(PrefixCacheConfig)]
    assert fields == [
        "num_blocks",
        "block_size",
        "gpu_staging_bytes",
        "staging_depth",
        "staging_capacity_tokens",
        "staging_claim_timeout_s",
        "copy_chunk_bytes",
        "host_bytes",
        "device_bytes",
    ]
    config = PrefixCacheConfig(num_blocks=3, block_size=5)
    assert (config.num_slots, config.host_bytes, config.device_bytes) == (15, None, None)
    with pytest.raises(TypeError):
        PrefixCacheConfig(3, 5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_blocks = 4


LEAST = {
    "num_blocks": 1,
    "block_size": 1,
    "gpu_staging_bytes": 0,
    "staging_depth": 1,
    "staging_capacity_tokens": 1,
    "staging_claim_timeout_s": 0,
    "copy_chunk_bytes": 1,
    "host_bytes": 0,
    "device_bytes": 0,
}


@pytest.mark.parametrize("name", sorted(LEAST))
@pytest.mark.parametrize("wrong", ["less", True, "3", float("nan"), float("inf"), [1]])
def test_a_size_that_cannot_work_is_refused_with_the_least_that_does(name, wrong):
    value = LEAST[name] - 1 if wrong == "less" else wrong
    with pytest.raises(ConfigurationError) as caught:
        PrefixCacheConfig(**{"num_blocks": 2, "block_size": 4, name: value})
    message = str(caught.value)
    assert f"{name} is {value!r}" in message and f"at least {LEAST[name]}" in message


def test_the_least_that_works_is_taken():
    assert PrefixCacheConfig(**LEAST).num_slots == 1
    assert PrefixCacheConfig(num_blocks=1, block_size=1, staging_claim_timeout_s=0.5).staging_claim_timeout_s == 0.5
    for name in ("num_blocks", "host_bytes"):
        with pytest.raises(ConfigurationError, match=name):
            PrefixCacheConfig(**LEAST | {name: 1.5})


# Policies -------------------------------------------------------------------------------------------------------------


def test_a_policy_by_default_needs_hidden_states_and_discovers_keys():
    policy = ModelCachePolicy()
    assert policy.needs_full_hidden_states and policy.discovers
    assert (policy.deferred_keys, policy.keys, dict(policy.specs)) == (frozenset(), None, {})


def test_a_policy_takes_plain_tuples():
    policy = ModelCachePolicy(deferred_keys={"k"}, keys=[("k", [2, 3], "bfloat16"), (HIDDEN_KEY, (4,), "float32")])
    assert policy.keys == (KeySpec("k", (2, 3), "bfloat16"), KeySpec(HIDDEN_KEY, (4,), "float32"))
    assert policy.deferred_keys == frozenset({"k"}) and not policy.discovers
    assert policy.specs["k"].row_bytes == 12 and str(policy.specs["k"]) == "k [2, 3] bfloat16"
    assert ModelCachePolicy(keys=()).keys == () and not ModelCachePolicy(keys=()).discovers


def test_a_discovering_policy_may_defer_keys_that_are_yet_to_come():
    assert ModelCachePolicy(deferred_keys=["later"]).deferred_keys == frozenset({"later"})


@pytest.mark.parametrize(
    "spec", [("k", (0,), "float32"), ("k", (2, -1), "float32"), ("k", (2.0,), "float32"), ("k", (2,), "complex64")]
)
def test_rows_that_cannot_be_kept_are_refused(spec):
    with pytest.raises(ConfigurationError) as caught:
        ModelCachePolicy(keys=[spec])
    message = str(caught.value)
    assert f"key k {list(spec[1])} {spec[2]} cannot be kept" in message
    assert "at least 1" in message and ", ".join(DTYPE_BYTES) in message


def test_a_key_declared_twice_is_refused():
    with pytest.raises(ConfigurationError, match=r"declared twice among \['k \[2\] float32', 'k \[3\] float32'\]"):
        ModelCachePolicy(keys=[("k", (2,), "float32"), ("k", (3,), "float32")])


@pytest.mark.parametrize(
    "options",
    [
        {"deferred_keys": {"j"}, "keys": [("k", (2,), "float32")]},
        {"deferred_keys": {HIDDEN_KEY}},
        {"deferred_keys": {HIDDEN_KEY}, "keys": [(HIDDEN_KEY, (2,), "float32")]},
    ],
)
def test_deferred_keys_are_declared_and_not_the_hidden_states(options):
    with pytest.raises(ConfigurationError, match=r"must be declared in keys .* hidden states cannot be deferred"):
        ModelCachePolicy(**options)


def test_a_policy_is_read_from_a_model():
    assert ModelCachePolicy.from_model(object()) == ModelCachePolicy()
    model = SimpleNamespace(
        requires_full_prefix_cached_hidden_states=False,
        deferred_prefix_cache_mm_keys=["codes"],
        prefix_cache_keys=[("codes", (16,), "int64"), KeySpec("other", (), "int32")],
    )
    policy = ModelCachePolicy.from_model(model)
    assert not policy.needs_full_hidden_states
    assert policy.deferred_keys == {"codes"}
    assert policy.keys == (KeySpec("codes", (16,), "int64"), KeySpec("other", (), "int32"))
    model = SimpleNamespace(deferred_prefix_cache_mm_keys=None, requires_full_prefix_cached_hidden_states=True)
    assert ModelCachePolicy.from_model(model) == ModelCachePolicy()
    assert ModelCachePolicy.from_model(SimpleNamespace(prefix_cache_keys=())).keys == ()


def test_the_states_of_a_write_are_the_peers():
    names = ["PENDING", "QUEUED", "COPYING", "HOST_READY", "WRITTEN", "FAILED"]
    assert [state.name for state in WriteState] == names

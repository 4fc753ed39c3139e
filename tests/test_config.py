"""Configuration: defaults, both namespaces, and every refusal with its remedy."""

import dataclasses

import pytest

from vllm_neuron_cache.config import (
    HARDWARE_LANES,
    LANES,
    EncoderNeuronConfig,
    NeuronCacheConfig,
    StageCacheConfig,
    is_enabled,
)
from vllm_neuron_cache.errors import ConfigurationError, NeuronCacheError


def read(**namespaces):
    return NeuronCacheConfig.from_additional_config(namespaces)


def refusal(**namespaces) -> str:
    with pytest.raises(ConfigurationError) as caught:
        read(**namespaces)
    return str(caught.value)


DEFAULTS = {
    "encoder_attention_block_size": 2048,
    "encoder_cache_num_blocks": None,
    "encoder_cache_min_hold_time_ms": None,
}


@pytest.mark.parametrize("additional_config", [None, {}, {"vllm_neuron_cache": {}}, {"someone_else": {"lane": "x"}}])
def test_nothing_given_means_the_documented_defaults(additional_config):
    config = NeuronCacheConfig.from_additional_config(additional_config)
    assert dataclasses.asdict(config) == {
        "encoder": DEFAULTS,
        "encoder_cache_block_size": None,
        "encoder_cache_num_blocks_exact": None,
        "eviction": "lru",
        "lane": "inductor",
        "kernel": "compiler",
        "compiled_encoder": False,
        "compiled_prefill": False,
        "stage_cache": None,
    }


def test_every_key_of_ours_is_read():
    values = {
        "encoder_cache_block_size": 64,
        "encoder_cache_num_blocks_exact": 17,
        "eviction": "gdsf",
        "lane": "neuron",
        "kernel": "nki",
        "compiled_encoder": True,
        "compiled_prefill": True,
    }
    config = read(vllm_neuron_cache=values)
    assert {name: getattr(config, name) for name in values} == values


@pytest.mark.parametrize("namespace", ["encoder_neuron_config", "vision_neuron_config"])
def test_the_encoder_namespace_is_read_under_both_of_its_names(namespace):
    values = {
        "encoder_attention_block_size": 1024,
        "encoder_cache_num_blocks": 40,
        "encoder_cache_min_hold_time_ms": 0,
    }
    assert dataclasses.asdict(read(**{namespace: values}).encoder) == values


def test_both_names_of_the_encoder_namespace_at_once_are_refused():
    message = refusal(encoder_neuron_config={}, vision_neuron_config={})
    assert "encoder_neuron_config" in message and "vision_neuron_config" in message


def test_keys_of_the_vendors_own_are_left_alone():
    values = {"fused_qkv": True, "buckets": [1, 2], "encoder_attention_block_size": 512}
    config = read(encoder_neuron_config=values, vllm_neuron_cache={})
    assert config.encoder == EncoderNeuronConfig(encoder_attention_block_size=512)
    assert values == {"fused_qkv": True, "buckets": [1, 2], "encoder_attention_block_size": 512}


def test_an_unknown_key_of_ours_is_refused_with_the_nearest_key():
    message = refusal(vllm_neuron_cache={"encoder_cache_blok_size": 64})
    assert "vllm_neuron_cache.encoder_cache_blok_size" in message
    assert "Did you mean 'encoder_cache_block_size'?" in message


def test_an_unknown_key_like_no_other_is_refused_with_all_keys_and_no_guess():
    message = refusal(vllm_neuron_cache={"zzz": 1})
    assert "Did you mean" not in message
    for key in ("encoder_cache_block_size", "encoder_cache_num_blocks_exact", "lane"):
        assert key in message


def test_the_field_for_the_other_namespace_is_no_key():
    assert "vllm_neuron_cache.encoder is not a configuration key" in refusal(vllm_neuron_cache={"encoder": {}})


@pytest.mark.parametrize("namespace", ["vllm_neuron_cache", "encoder_neuron_config", "vision_neuron_config"])
@pytest.mark.parametrize("values", [None, True, "on", [], 3])
def test_a_namespace_that_is_no_object_is_refused_by_its_name(namespace, values):
    message = refusal(**{namespace: values})
    assert namespace in message and repr(values) in message


SIZES = [
    ("encoder_neuron_config", "encoder_attention_block_size", 1),
    ("encoder_neuron_config", "encoder_cache_num_blocks", 2),
    ("encoder_neuron_config", "encoder_cache_min_hold_time_ms", 0),
    ("vllm_neuron_cache", "encoder_cache_block_size", 1),
    ("vllm_neuron_cache", "encoder_cache_num_blocks_exact", 2),
]


@pytest.mark.parametrize("namespace, key, minimum", SIZES)
def test_the_smallest_legal_size_is_taken_and_one_less_is_refused(namespace, key, minimum):
    config = read(**{namespace: {key: minimum}})
    holder = config if namespace == "vllm_neuron_cache" else config.encoder
    assert getattr(holder, key) == minimum
    message = refusal(**{namespace: {key: minimum - 1}})
    assert f"{namespace}.{key} is {minimum - 1}" in message and f"at least {minimum}" in message


@pytest.mark.parametrize("namespace, key, minimum", SIZES)
@pytest.mark.parametrize("value", [True, False, 64.0, "64", [64]])
def test_a_size_that_is_no_whole_number_is_refused_with_what_was_given(namespace, key, minimum, value):
    assert f"{namespace}.{key} is {value!r}" in refusal(**{namespace: {key: value}})


@pytest.mark.parametrize("namespace, key, minimum", SIZES[1:])
def test_null_means_the_default_where_the_default_is_none(namespace, key, minimum):
    assert read(**{namespace: {key: None}}) == NeuronCacheConfig()
    assert "or null" in refusal(**{namespace: {key: minimum - 1}})


def test_null_is_refused_where_a_size_is_always_needed():
    message = refusal(encoder_neuron_config={"encoder_attention_block_size": None})
    assert "is None" in message and "or null" not in message


@pytest.mark.parametrize("milliseconds", [0, 1, 100, 60_000])
def test_any_hold_time_from_zero_is_taken(milliseconds):
    config = read(encoder_neuron_config={"encoder_cache_min_hold_time_ms": milliseconds})
    assert config.encoder.encoder_cache_min_hold_time_ms == milliseconds


def test_a_floor_and_a_fixed_number_of_blocks_together_are_refused_with_both_values():
    message = refusal(
        encoder_neuron_config={"encoder_cache_num_blocks": 31}, vllm_neuron_cache={"encoder_cache_num_blocks_exact": 47}
    )
    assert "31" in message and "47" in message


@pytest.mark.parametrize("lane", ["neuronx", "", None, ["eager"]])
def test_an_unknown_lane_is_refused_with_the_lanes_there_are(lane):
    message = refusal(vllm_neuron_cache={"lane": lane})
    assert repr(lane) in message and "inductor" in message and "eager" in message


@pytest.mark.parametrize("kernel", ["NKI", "", None, ["nki"]])
def test_an_unknown_kernel_is_refused_with_the_kernels_there_are(kernel):
    message = refusal(vllm_neuron_cache={"kernel": kernel, "lane": "neuron"})
    assert repr(kernel) in message and "give one of compiler, nki" in message


@pytest.mark.parametrize("lane", sorted(set(LANES) - set(HARDWARE_LANES)))
def test_the_kernels_of_the_device_are_refused_in_a_lane_of_the_cpu(lane):
    message = refusal(vllm_neuron_cache={"kernel": "nki", "lane": lane})
    assert "vllm_neuron_cache.kernel is 'nki'" in message and f"the lane is {lane!r}" in message
    assert "vllm_neuron_cache.lane to one of neuron, neuronx_trace, nxd_builder" in message and "'compiler'" in message


@pytest.mark.parametrize("lane", HARDWARE_LANES)
def test_the_kernels_of_the_device_are_taken_in_its_lanes(lane):
    assert read(vllm_neuron_cache={"kernel": "nki", "lane": lane}).kernel == "nki"


@pytest.mark.parametrize(
    ("values", "config"),
    [
        (None, None),
        ({}, StageCacheConfig()),
        ({"store": "host", "host_bytes": 4096}, StageCacheConfig(host_bytes=4096)),
        ({"store": "device", "device_bytes": 0}, StageCacheConfig(store="device", device_bytes=0)),
    ],
)
def test_an_object_turns_the_stage_cache_on(values, config):
    assert read(vllm_neuron_cache={"stage_cache": values}).stage_cache == config


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (True, "stage_cache is True; give an object"),
        ([], "stage_cache is []"),
        ({"stores": "host"}, "stage_cache.stores is not a configuration key. Did you mean 'store'?"),
        ({"store": "disk"}, "stage_cache.store is 'disk'; give one of host, device"),
        ({"host_bytes": True}, "stage_cache.host_bytes is True"),
        ({"device_bytes": -1, "store": "device"}, "stage_cache.device_bytes is -1"),
        ({"device_bytes": 1}, "limits a 'device' store and vllm_neuron_cache.stage_cache.store is 'host'"),
    ],
)
def test_what_is_wrong_under_the_stage_cache_is_refused(values, text):
    assert text in refusal(vllm_neuron_cache={"stage_cache": values})


def test_a_refusal_is_bad_input_to_code_that_does_not_know_this_package():
    with pytest.raises(ValueError):
        read(vllm_neuron_cache={"lane": "x"})
    assert issubclass(ConfigurationError, NeuronCacheError)


def test_a_configuration_cannot_be_changed_after_it_was_checked():
    with pytest.raises(dataclasses.FrozenInstanceError):
        NeuronCacheConfig().lane = "x"
    with pytest.raises(dataclasses.FrozenInstanceError):
        EncoderNeuronConfig().encoder_attention_block_size = 0


@pytest.mark.parametrize(
    "additional_config, enabled",
    [
        ({"vllm_neuron_cache": {}}, True),
        ({"vllm_neuron_cache": None}, True),
        ({"encoder_neuron_config": {}}, False),
        ({}, False),
        (None, False),
        ("vllm_neuron_cache", False),
        (["vllm_neuron_cache"], False),
    ],
)
def test_the_key_alone_turns_the_cache_on(additional_config, enabled):
    assert is_enabled(additional_config) is enabled


@pytest.mark.parametrize("additional_config", [[1], "vllm_neuron_cache", 3])
def test_what_is_not_an_object_is_refused(additional_config):
    with pytest.raises(ConfigurationError, match="give an object"):
        NeuronCacheConfig.from_additional_config(additional_config)


def test_a_key_that_is_not_a_string_is_refused():
    with pytest.raises(ConfigurationError, match="1 is not a configuration key"):
        NeuronCacheConfig.from_additional_config({"vllm_neuron_cache": {1: 2}})

"""Qwen2.5-Omni's static audio encoder against transformers' tower, on sound of every kind of length."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed (extra 'cpu')")

import torch
from towers import ATTENTION_BLOCK, LANES, check_rules, encode, error, errors, require_lane, rounded_to
from transformers import WhisperFeatureExtractor
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniAudioEncoderConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniAudioEncoder

from vllm_neuron_cache.demo.media import SAMPLING_RATE, make_speech
from vllm_neuron_cache.demo.recipe import randomise
from vllm_neuron_cache.encoder_cache.packing import Bucket
from vllm_neuron_cache.encoders.interface import EncoderItem
from vllm_neuron_cache.encoders.qwen_omni_audio import QwenOmniAudioEncoder
from vllm_neuron_cache.encoders.static_encoder import encoder_ladder
from vllm_neuron_cache.errors import ConfigurationError

pytestmark = pytest.mark.vllm

BOUND = 1e-4
CHUNK = 100
CONFIG = Qwen2_5OmniAudioEncoderConfig(
    num_mel_bins=80,
    encoder_layers=2,
    encoder_attention_heads=4,
    encoder_ffn_dim=112,
    d_model=48,
    n_window=CHUNK // 2,
    max_source_positions=150,
    output_dim=72,
)
BUCKET = Bucket(CHUNK // 2, 4)
# Mel frames: one row, a part of a chunk, a whole chunk, one and two frames over it, several chunks, rests of any kind.
LENGTHS = (3, 4, 57, CHUNK - 1, CHUNK, CHUNK + 1, CHUNK + 2, 2 * CHUNK, 3 * CHUNK + 37, 4 * CHUNK + 50)


def mel(speaker: int, num_frames: int) -> torch.Tensor:
    """`[mel bins, frames]`, as vLLM's processor makes them."""
    extractor = WhisperFeatureExtractor(feature_size=CONFIG.num_mel_bins, sampling_rate=SAMPLING_RATE)
    speech = make_speech(speaker, num_frames / 100 + 0.02)
    return extractor(speech, sampling_rate=SAMPLING_RATE, return_tensors="pt")["input_features"][0, :, :num_frames]


@pytest.fixture(scope="module")
def sounds():
    return {f"{length} frames": mel(length, length) for length in LENGTHS}


def tower_of(dtype: torch.dtype, weights: torch.dtype | None = None) -> Qwen2_5OmniAudioEncoder:
    """A tower of that dtype, with weights that `weights` holds. Its table of positions stays in float32, as in vLLM."""
    torch.manual_seed(0)
    tower = Qwen2_5OmniAudioEncoder(CONFIG).eval()
    randomise(tower)
    rounded_to(tower, weights or dtype).to(dtype)
    tower.positional_embedding.float()
    return tower


@pytest.fixture(scope="module")
def tower():
    return tower_of(torch.float32)


def adapter_of(tower: Qwen2_5OmniAudioEncoder) -> QwenOmniAudioEncoder:
    return QwenOmniAudioEncoder(CONFIG, dtype=tower.dtype, tower=tower)


@pytest.fixture
def adapter(tower):
    return adapter_of(tower)


def item_of(adapter: QwenOmniAudioEncoder, sound: torch.Tensor) -> EncoderItem:
    return adapter.item("audio", {"input_audio_features": sound, "audio_feature_lengths": torch.tensor(sound.shape[1])})


def items_of(adapter: QwenOmniAudioEncoder, sounds: dict[str, torch.Tensor]) -> dict[str, EncoderItem]:
    return {name: item_of(adapter, sound) for name, sound in sounds.items()}


def stock_rows(tower: Qwen2_5OmniAudioEncoder, sounds: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All together, as vLLM calls it for the sounds of a step."""
    lengths = torch.tensor([sound.shape[1] for sound in sounds.values()])
    after, rows = tower._get_feat_extract_output_lengths(lengths)
    with torch.inference_mode():
        features = torch.cat(list(sounds.values()), dim=1).to(tower.dtype)
        out = tower(features, feature_lens=lengths, aftercnn_lens=after).last_hidden_state
    return dict(zip(sounds, out.split(rows.tolist())))


@pytest.fixture(scope="module")
def stock(tower, sounds):
    return stock_rows(tower, sounds)


# Rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lane", "call_layers"), LANES)
def test_rows_are_those_of_the_tower(adapter, sounds, stock, lane, call_layers):
    require_lane(lane)
    bucket = None if lane == "eager" else BUCKET
    rows = encode(adapter, items_of(adapter, sounds), lane=lane, call_layers=call_layers, bucket=bucket)
    assert max(errors(rows, stock).values()) < BOUND


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_not_worse_than_the_towers(sounds, dtype):
    adapter = adapter_of(tower_of(dtype))
    exact = stock_rows(tower_of(torch.float64, dtype), {name: sound.to(dtype) for name, sound in sounds.items()})
    own = errors(encode(adapter, items_of(adapter, sounds), bucket=BUCKET), exact)
    stock = errors(stock_rows(adapter.tower, sounds), exact)
    assert {name: own[name] / stock[name] for name in own if own[name] > 1.5 * stock[name]} == {}


def test_activations_that_leave_float16_are_clamped_as_in_the_tower(sounds):
    tower = tower_of(torch.float16)
    first, second = tower.layers
    with torch.no_grad():
        # Out of the range in the first layer, and back before two positions are added up at the end.
        for linear, bias in ((first.self_attn.out_proj, 6e4), (first.fc2, 6e4), (second.self_attn.out_proj, -6e4)):
            linear.bias[0] = bias
    adapter, sounds = adapter_of(tower), {"one": sounds[f"{CHUNK} frames"]}
    exact, rows = stock_rows(tower, sounds), encode(adapter, items_of(adapter, sounds), bucket=BUCKET)
    assert error(rows["one"], exact["one"]) < 0.01


def test_padding_of_the_front_end_is_left_out(adapter, sounds, stock):
    """vLLM's front end in Rust sends as many frames as the longest sound has."""
    sound = sounds["57 frames"]
    padded = torch.cat([sound, torch.full((CONFIG.num_mel_bins, 90), 0.7)], dim=1)
    item = adapter.item("audio", {"input_audio_features": padded, "audio_feature_lengths": torch.tensor([57])})
    assert error(encode(adapter, {"padded": item}, bucket=BUCKET)["padded"], stock["57 frames"]) < BOUND


@pytest.mark.parametrize(
    ("num_frames", "segments"),
    [(1, ()), (2, ()), (3, (2,)), (100, (50,)), (101, (50,)), (103, (50, 2)), (250, (50, 50, 25))],
)
def test_chunks_are_segments_and_a_rest_without_a_row_is_none(adapter, num_frames, segments):
    assert item_of(adapter, torch.zeros(CONFIG.num_mel_bins, num_frames)).segments == segments


# What must show --------------------------------------------------------------------------------------------------


def with_inputs(items: dict[str, EncoderItem], change) -> dict[str, EncoderItem]:
    def changed(item: EncoderItem) -> EncoderItem:
        return item._replace(inputs=lambda segment: change(*item.inputs(segment)))

    return {name: changed(item) for name, item in items.items()}


def test_control_frames_behind_the_last_show(adapter, sounds, stock):
    def live_to_the_end(frames: torch.Tensor, live: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return frames, live.new_ones(len(live) + len(live) % 2)

    items = with_inputs(items_of(adapter, sounds), live_to_the_end)
    wrong = errors(encode(adapter, items, bucket=BUCKET), stock)
    assert wrong["3 frames"] > 100 * BOUND and wrong["57 frames"] > BOUND
    # Only an odd one has a frame behind it that the convolution sees.
    assert wrong[f"{CHUNK} frames"] < BOUND and wrong["4 frames"] < BOUND


def test_control_a_chunk_that_ends_a_frame_earlier_shows(adapter, sounds, stock):
    name = f"{2 * CHUNK} frames"
    frames = sounds[name].T
    parts = (frames[: CHUNK - 1], frames[CHUNK - 1 : -1])
    item = EncoderItem((CHUNK // 2,) * 2, lambda segment: (parts[segment], torch.ones(len(parts[segment]))))
    rows = encode(adapter, {name: item}, bucket=BUCKET)[name]
    assert error(rows, stock[name]) > 100 * BOUND


def test_control_without_the_mask_padding_is_attended_to(adapter, sounds, stock, monkeypatch):
    forward = adapter.forward
    monkeypatch.setattr(adapter, "forward", lambda inputs, ids, weights: forward(inputs, ids * 0, weights))
    wrong = errors(encode(adapter, items_of(adapter, sounds), bucket=BUCKET), stock)
    assert wrong["57 frames"] > 100 * BOUND
    assert wrong[f"{CHUNK} frames"] < BOUND


def test_control_positions_that_are_one_further_show(sounds, stock):
    adapter = adapter_of(tower_of(torch.float32))
    adapter.tower.positional_embedding.positional_embedding.copy_(
        adapter.tower.positional_embedding.positional_embedding.roll(-1, dims=0)
    )
    wrong = errors(encode(adapter, items_of(adapter, sounds), bucket=BUCKET), stock)
    assert min(wrong.values()) > 100 * BOUND


# Without a model -------------------------------------------------------------------------------------------------


def test_weights_are_those_of_the_tower(tower):
    weights = dict(tower.named_parameters()) | dict(tower.named_buffers())
    del weights["audio_bos_eos_token.weight"]  # which the tower itself does not read
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    assert QwenOmniAudioEncoder(CONFIG, dtype=torch.float32).weight_shapes == shapes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_obey_the_rules_in_every_bucket(dtype):
    adapter = QwenOmniAudioEncoder(CONFIG, dtype=dtype)
    ladder = encoder_ladder(adapter, ATTENTION_BLOCK)
    assert ladder.block_positions == (CHUNK // 2,) and ladder.max_segments == 1
    check_rules(adapter, ladder)


def test_rows_that_two_chunks_share_are_refused():
    config = SimpleNamespace(**(CONFIG.to_dict() | {"n_window": 25}))
    with pytest.raises(ConfigurationError, match="n_window 25 is odd"):
        QwenOmniAudioEncoder(config, dtype=torch.float32)


def test_item_without_sound_is_none(adapter):
    assert adapter.item("audio", {"audio_feature_lengths": torch.tensor(100)}) is None

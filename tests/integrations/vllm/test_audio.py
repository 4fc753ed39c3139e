"""Sound, pictures and video pass through the cache in Qwen2.5-Omni's thinker, also a clip with its sound in between."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from engines import start

pytest.importorskip("vllm", reason="vLLM is not installed (extra 'cpu')")

import torch
from vllm import SamplingParams

from vllm_neuron_cache.demo.media import SAMPLING_RATE, load_clip, load_photograph, make_speech
from vllm_neuron_cache.demo.omni_checkpoint import (
    AUDIO_PLACEHOLDER,
    IMAGE_PLACEHOLDER,
    VIDEO_PLACEHOLDER,
    build_omni_checkpoint,
)
from vllm_neuron_cache.demo.recipe import chat_prompt
from vllm_neuron_cache.errors import ConfigurationError, DemoError, EncoderOutputError, ItemTooLargeError, request_error
from vllm_neuron_cache.integrations.vllm.geometry import resolve_geometry

pytestmark = pytest.mark.vllm

ARGUMENTS = {"limit_mm_per_prompt": {"audio": 2, "image": 2, "video": 1}}
TOKENS = 12
ROWS_PER_SECOND = 25  # of sound
# Cuts every item but the shortest sound, and between the sound and the frames of the videos that have both.
CHUNK = 77


def small_clip(num_frames: int) -> tuple[np.ndarray, dict]:
    """Frames of 140 rows each two, so that the model hears the sound beside them."""
    import cv2

    frames, metadata = load_clip(num_frames).vllm_input
    return np.stack([cv2.resize(frame, (168, 112)) for frame in frames]), metadata


SOUNDS = {name: make_speech(speaker, seconds) for name, speaker, seconds in [("a", 1, 6), ("b", 2, 3), ("c", 3, 12)]}
PICTURES = {name: load_photograph(name) for name in ("astronaut", "chelsea")}
# Long enough for sound to stand between frames, not only after them. One sound for each clip: vLLM's caches know a
# spoken clip without its sound.
CLIPS = {"a": small_clip(8), "b": small_clip(6), "c": small_clip(12)}
_PLACEHOLDERS = {
    **dict.fromkeys(SOUNDS, AUDIO_PLACEHOLDER),
    **dict.fromkeys(PICTURES, IMAGE_PLACEHOLDER),
}


def prompt(text: str, *, clip: str | None = None, spoken: bool = False) -> dict:
    """Names in braces stand for sounds and pictures, and `{clip}` for the clip of that name.

    `spoken`: the sound of the same name goes between the frames of the clip.
    """
    names = [part.split("}")[0] for part in text.split("{")[1:]]
    data = {
        "audio": [(SOUNDS[name], SAMPLING_RATE) for name in [*names, *([clip] if spoken else [])] if name in SOUNDS],
        "image": [PICTURES[name] for name in names if name in PICTURES],
        "video": [CLIPS[clip]] if clip else [],
    }
    return {
        "prompt": chat_prompt(text.format(clip=VIDEO_PLACEHOLDER, **_PLACEHOLDERS)),
        "multi_modal_data": {modality: items for modality, items in data.items() if items},
        **({"mm_processor_kwargs": {"use_audio_in_video": True}} if spoken else {}),
    }


PROMPTS = {
    "sound": prompt("{a}What is said?"),
    "sound again": prompt("Once more. {a}What is said?"),
    "two sounds": prompt("{b}and then{a}Who speaks?"),
    "one sound twice": prompt("{b}and{b}The same?"),
    "sound and picture": prompt("{b}{astronaut}What is said?"),
    "picture and sound": prompt("Look. {astronaut}Listen. {a}And?"),
    "sound and clip": prompt("{a}{clip}What happens?", clip="b"),
    "all three": prompt("{chelsea}{clip}{b}What happens?", clip="b"),
    "text": prompt("Who are you?"),
}
SPOKEN = {
    "spoken clip": prompt("{clip}What is said?", clip="a", spoken=True),
    "spoken clip again": prompt("Once more. {clip}What is said?", clip="a", spoken=True),
    "longer spoken clip": prompt("{clip}What is said?", clip="c", spoken=True),
    "picture and spoken clip": prompt("{astronaut}{clip}What is said?", clip="b", spoken=True),
}
# A sound or a picture is another item beside a spoken clip, whose processor option it gets.
NUM_ITEMS = 5 + 7


def answers(engine, prompts: dict[str, dict]) -> dict[str, tuple[int, ...]]:
    return {name: engine.generate([one], max_tokens=TOKENS)[0].token_ids for name, one in prompts.items()}


def forget(engine) -> None:
    engine.llm.reset_prefix_cache()
    engine.llm.llm_engine.reset_encoder_cache()


@pytest.fixture(scope="module")
def stock(omni_checkpoint):
    """Tokens of stock vLLM, by prompt. Of the spoken clips without chunks: where one begins in sound and ends in
    frames, stock vLLM puts rows of the one in places of the other."""
    engine = start(omni_checkpoint, None, **ARGUMENTS)
    expected = answers(engine, PROMPTS | SPOKEN)
    engine.llm.reset_prefix_cache()
    engine.scheduler.scheduler_config.long_prefill_token_threshold = CHUNK
    assert answers(engine, PROMPTS) == {name: expected[name] for name in PROMPTS}
    engine.close()
    # Comparisons mean something: what is heard and seen changes the answer.
    assert len(set(expected.values())) == len(expected)
    return expected


# Depends on `stock`, because an engine that is closed takes vLLM's process groups of all with it.
@pytest.fixture(scope="module")
def engine(omni_checkpoint, stock):
    engine = start(omni_checkpoint, {"lane": "eager"}, **ARGUMENTS)
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def empty(request):
    """A test of the shared engine begins with nothing cached, and ends with everything in order."""
    shared = request.getfixturevalue("engine") if "engine" in request.fixturenames else None
    if shared is not None:
        forget(shared)
    yield
    if shared is not None:
        shared.manager.check_integrity([shared.worker.check_encoder_cache_integrity()])


# Engines of their own, one at a time ---------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [512, 64, 16])
def test_tokens_are_those_of_stock(omni_checkpoint, stock, block_size):
    engine = start(omni_checkpoint, {"lane": "eager", "encoder_cache_block_size": block_size}, **ARGUMENTS)
    assert engine.manager.geometry.block_size == block_size
    together = engine.generate(list((PROMPTS | SPOKEN).values()), max_tokens=TOKENS)
    assert [completion.token_ids for completion in together] == list(stock.values())
    assert engine.encoder_runs == NUM_ITEMS
    forget(engine)
    engine.scheduler.scheduler_config.long_prefill_token_threshold = CHUNK
    assert answers(engine, PROMPTS | SPOKEN) == stock
    engine.manager.check_integrity([engine.worker.check_encoder_cache_integrity()])
    assert engine.manager.stats.invalidations == 0
    engine.close()


def test_sound_that_cannot_fit_is_refused_at_arrival_with_the_sizes(omni_checkpoint, stock):
    cache = {"lane": "eager", "encoder_cache_block_size": 16, "encoder_cache_num_blocks_exact": 6}
    engine = start(omni_checkpoint, cache, **ARGUMENTS)
    with pytest.raises(
        ItemTooLargeError,
        match=r"^audio 0 of the prompt has 150 token rows and needs 10 blocks of 16 rows; the cache has 5 blocks",
    ):
        engine.generate([PROMPTS["sound"]], max_tokens=TOKENS)
    assert engine.encoder_runs == 0
    assert answers(engine, {"": PROMPTS["one sound twice"]}) == {"": stock["one sound twice"]}
    assert engine.encoder_runs == 1
    engine.manager.check_integrity([engine.worker.check_encoder_cache_integrity()])
    engine.close()


def test_the_vision_merger_is_found_in_the_thinkers_configuration(engine):
    geometry = resolve_geometry(engine.llm.llm_engine.vllm_config)
    assert geometry.encoder_block_size == 2048 // 4


# Hits ----------------------------------------------------------------------------------------------------------


def follow_encoders(engine, monkeypatch, follow: Callable[[str, Sequence[torch.Tensor]], Any]) -> None:
    """Calls `follow` with the modality and the outputs whenever an encoder has run; what it returns takes their place,
    unless it is None."""
    model = engine.runner.model

    def following(modality, process, inputs):
        outputs = process(inputs)
        replaced = follow(modality, outputs)
        return outputs if replaced is None else replaced

    for modality in ("audio", "image", "video"):
        name = f"_process_{modality}_input"
        monkeypatch.setattr(model, name, partial(following, modality, getattr(model, name)))


def recorded_modalities(engine, monkeypatch) -> list[str]:
    """Of every item that the encoders run on, its modality."""
    encoded = []
    follow_encoders(engine, monkeypatch, lambda modality, outputs: encoded.extend([modality] * len(outputs)))
    return encoded


def test_repeated_sound_is_not_encoded_again(engine, stock, monkeypatch):
    encoded = recorded_modalities(engine, monkeypatch)
    hits = engine.manager.stats.hits
    names = ("sound", "sound again", "two sounds", "one sound twice")
    assert answers(engine, {name: PROMPTS[name] for name in names}) == {name: stock[name] for name in names}
    assert encoded == ["audio", "audio"]
    assert engine.manager.stats.hits - hits == 3


def test_a_cached_picture_is_read_while_the_sound_beside_it_is_encoded(engine, stock, monkeypatch):
    answers(engine, {"": prompt("{astronaut}What is this?")})
    encoded, windows = recorded_modalities(engine, monkeypatch), []
    plan_reads = engine.runner._plan_reads

    def recording(read, num_step_tokens):
        windows.append([window.num_rows for window in read])
        return plan_reads(read, num_step_tokens)

    monkeypatch.setattr(engine.runner, "_plan_reads", recording)
    assert answers(engine, {"": PROMPTS["picture and sound"]}) == {"": stock["picture and sound"]}
    assert encoded == ["audio"]
    assert windows == [[18 * 18, 6 * ROWS_PER_SECOND]]


@pytest.mark.parametrize("chunk", [0, CHUNK])
@pytest.mark.parametrize("name", ["all three", *SPOKEN])
def test_each_row_comes_from_its_own_item(engine, monkeypatch, name, chunk):
    """Also where a chunk ends between the frames and the sound of a spoken clip, or in one of them."""
    outputs, merged, merge = {}, [], engine.runner.encoder_runtime.merge
    follow_encoders(engine, monkeypatch, lambda modality, encoded: outputs.update({modality: encoded[0]}))

    def merging(plan):
        merge(plan)
        places = torch.from_numpy(np.flatnonzero(plan.is_embed))
        ids = engine.runner.input_ids.gpu[places]
        merged.append((ids.clone(), engine.runner.inputs_embeds.gpu[places].clone()))

    monkeypatch.setattr(engine.runner.encoder_runtime, "merge", merging)
    monkeypatch.setattr(engine.scheduler.scheduler_config, "long_prefill_token_threshold", chunk)
    answers(engine, {"": (PROMPTS | SPOKEN)[name]})
    assert (len(merged) > 1) == bool(chunk)
    ids, rows = (torch.cat(parts) for parts in zip(*merged))
    assert len(outputs) > 1
    for modality, output in outputs.items():
        assert torch.equal(rows[ids == getattr(engine.runner.model.config, f"{modality}_token_index")], output)


# What must show ------------------------------------------------------------------------------------------------


def two_rows_swapped(rows: torch.Tensor) -> torch.Tensor:
    return rows[[len(rows) - 1, *range(1, len(rows) - 1), 0]]


@pytest.mark.parametrize("modality", ["audio", "image", "video"])
@pytest.mark.parametrize("damaged", [False, True])
def test_damaged_rows_of_any_modality_change_tokens(engine, stock, monkeypatch, modality, damaged):
    name = {"audio": "sound", "image": "picture and sound", "video": "picture and spoken clip"}[modality]

    def damage(encoded, outputs):
        return [two_rows_swapped(rows) for rows in outputs] if damaged and encoded == modality else None

    follow_encoders(engine, monkeypatch, damage)
    assert (answers(engine, {name: (PROMPTS | SPOKEN)[name]}) != {name: stock[name]}) == damaged


def test_rows_of_sound_and_frames_exchanged_change_tokens(engine, stock, monkeypatch):
    """As if the rows of a spoken clip went to its places in the order of its items."""
    plan_reads = engine.runner._plan_reads

    def exchanging(windows, num_step_tokens):
        plan = plan_reads(windows, num_step_tokens)
        plan.dst_rows[: plan.num_rows].sort()
        return plan

    monkeypatch.setattr(engine.runner, "_plan_reads", exchanging)
    assert answers(engine, {"": SPOKEN["spoken clip"]}) != {"": stock["spoken clip"]}


# Failures and refusals -----------------------------------------------------------------------------------------


def test_a_spoken_clip_sent_again_with_other_sound_fails_alone(engine, stock):
    """vLLM's processor cache gives it the placeholders of the first sound. Stock vLLM reads wrong rows, or ends."""
    answers(engine, {"": SPOKEN["spoken clip"]})
    engine.llm.reset_prefix_cache()
    other = prompt("{clip}What is said?", clip="a", spoken=True)
    other["multi_modal_data"]["audio"] = [(SOUNDS["b"], SAMPLING_RATE)]
    (output,) = engine.llm.generate([other], SamplingParams(temperature=0, max_tokens=TOKENS), use_tqdm=False)
    assert output.outputs[0].finish_reason == "error"
    error = request_error(output.outputs[0].stop_reason)
    assert isinstance(error, EncoderOutputError) and "[75, " in str(error) and "[150, " in str(error)
    assert answers(engine, {"": SPOKEN["spoken clip"]}) == {"": stock["spoken clip"]}


def test_encoders_of_different_widths_are_refused_with_the_remedy(engine, monkeypatch):
    encode = engine.runner._encode_probe

    def narrow_sound(modality):
        return encode(modality)[:, : 64 if modality == "audio" else 128]

    monkeypatch.setattr(engine.runner, "_encode_probe", narrow_sound)
    with pytest.raises(ConfigurationError, match=r"64 for audio, 128 for image, 128 for video.*limit_mm_per_prompt"):
        engine.runner._measure_encoder_width()


def test_a_model_that_merges_in_another_way_is_refused(engine, monkeypatch):
    class Other(type(engine.runner.model)):
        def embed_input_ids(self, *args, **kwargs):
            return super().embed_input_ids(*args, **kwargs)

    monkeypatch.setattr(engine.runner.model, "__class__", Other)
    with pytest.raises(ConfigurationError, match="Other merges embeddings in a way of its own"):
        engine.runner._require_known_merge(128)


# Checkpoint and sound ------------------------------------------------------------------------------------------


def test_the_checkpoint_is_the_same_every_time_and_takes_no_other_for_itself(omni_checkpoint, tmp_path):
    built = build_omni_checkpoint(tmp_path / "again")
    files = sorted(path.name for path in built.iterdir())
    assert files == sorted(path.name for path in omni_checkpoint.iterdir())
    for name in files:
        assert (built / name).read_bytes() == (omni_checkpoint / name).read_bytes(), name
    assert build_omni_checkpoint(built) == built
    (built / "checkpoint_version").write_text("1")  # what the other recipe's says
    with pytest.raises(DemoError, match="again exists and is not version omni-1"):
        build_omni_checkpoint(built)


def test_speech_is_the_same_for_a_speaker_and_of_the_length_asked_for():
    long, short = make_speech(1, 2.6), make_speech(1, 1.1)
    assert long.dtype == np.float32 and len(long) == 2.6 * SAMPLING_RATE
    assert np.array_equal(long[: len(short)], short)
    assert np.abs(short).mean() > 0.01 and np.abs(long).max() <= 1
    assert not np.array_equal(make_speech(2, 1.1), short)

"""Tenants, adapters and weights: who shares an entry with whom, on a real engine."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from engines import start
from safetensors.torch import save_file

from vllm_neuron_cache.demo.media import load_photograph
from vllm_neuron_cache.demo.requests import Media, MediaRequest, engine_prompt

pytestmark = pytest.mark.vllm

ARGUMENTS = {"block_size": 32}


def prompt(before: str = "Look. ", salt: str | None = None, after: str = "") -> dict:
    media = Media(images={"astronaut": load_photograph("astronaut")})
    made = dict(engine_prompt(MediaRequest(before=before, images=("astronaut",), after=after), media))
    return made | ({"cache_salt": salt} if salt else {})


def generate(engine, prompts: list[dict], **arguments):
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    return engine.llm.generate(prompts, sampling, use_tqdm=False, **arguments)


def tokens(outputs) -> list[tuple[int, ...]]:
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def worker_keys(engine) -> set[str]:
    return {entry.key for entry in engine.worker.check_encoder_cache_integrity()}


@pytest.fixture(scope="module")
def engine(checkpoint):
    engine = start(checkpoint, {"lane": "eager"}, **ARGUMENTS)
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def fresh(request):
    if "engine" in request.fixturenames:
        engine = request.getfixturevalue("engine")
        engine.llm.reset_prefix_cache()
        engine.llm.llm_engine.reset_encoder_cache()


def test_tenants_share_nothing_and_get_the_same_tokens(engine):
    runs = engine.encoder_runs
    expected = tokens(generate(engine, [prompt()]))
    for number, salt in enumerate(("alice", "bob"), start=2):
        assert tokens(generate(engine, [prompt(salt=salt)])) == expected
        assert engine.encoder_runs - runs == number
    assert len(worker_keys(engine)) == 3
    # Each finds its own again, with the KV prefix gone.
    engine.llm.reset_prefix_cache()
    for salt in ("alice", "bob", None):
        assert tokens(generate(engine, [prompt(salt=salt)])) == expected
    assert engine.encoder_runs - runs == 3


def test_two_tenants_in_one_step(engine):
    runs = engine.encoder_runs
    outputs = generate(engine, [prompt(salt="alice"), prompt(salt="bob"), prompt(salt="alice", before="Again. ")])
    assert tokens(outputs)[0] == tokens(outputs)[1]
    assert engine.encoder_runs - runs == 2
    assert len(worker_keys(engine)) == 2


@pytest.mark.parametrize("salt", [None, "alice"])
def test_a_second_turn_finds_the_kv_blocks_of_the_first(engine, salt):
    """Block hashes are made from the keys: they have to be made again when the keys are."""
    generate(engine, [prompt(salt=salt, after="First question. " * 12)])
    (second,) = generate(engine, [prompt(salt=salt, after="First question. " * 12 + "And then?")])
    assert second.num_cached_tokens > 256


def test_samples_of_one_request_share_the_item(engine):
    from vllm import SamplingParams

    runs = engine.encoder_runs
    sampling = SamplingParams(temperature=1.0, n=3, seed=1, max_tokens=4, ignore_eos=True)
    (output,) = engine.llm.generate([prompt(salt="alice")], sampling, use_tqdm=False)
    assert len(output.outputs) == 3
    assert engine.encoder_runs - runs == 1
    engine.manager.check_integrity()


def test_without_a_salt_the_key_is_the_hash_of_the_content(engine):
    generate(engine, [prompt()])
    (key,) = worker_keys(engine)
    assert len(key) == 64 and int(key, 16)


def test_after_new_weights_nothing_of_before_is_found(checkpoint):
    """Neither encoder rows nor KV rows over the image; the tokens are those of an engine that had no other weights."""

    def change_weights(worker):
        model = worker.model_runner.model
        generator = torch.Generator().manual_seed(7)
        name, weight = next((n, p) for n, p in model.named_parameters() if n.endswith("visual.merger.norm.weight"))
        changed = weight + torch.randn(weight.shape, generator=generator)
        model.load_weights([(name, changed)])

    long = {"before": "word " * 60}
    engines = [start(checkpoint, cache, **ARGUMENTS) for cache in ({"lane": "eager"}, None)]
    ours, stock = engines
    before = tokens(generate(ours, [prompt(**long)]))
    stock.llm.collective_rpc(change_weights)
    expected = tokens(generate(stock, [prompt(**long)]))
    assert expected != before

    # Queued before the change and first scheduled after it.
    from vllm import SamplingParams

    llm_engine = ours.llm.llm_engine
    llm_engine.add_request("queued", prompt(**long), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    ours.llm.collective_rpc(change_weights)
    queued = []
    while llm_engine.has_unfinished_requests():
        queued += [output for output in llm_engine.step() if output.finished]
    assert tokens(queued) == expected
    (again,) = generate(ours, [prompt(**long)])
    assert tokens([again]) == expected
    assert again.num_cached_tokens > 256  # of the queued one, under the same new key
    ours.worker.check_encoder_cache_integrity()
    for engine in engines:
        engine.close()


def write_adapter(directory, seed: int, hidden_size: int) -> str:
    directory.mkdir()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": 8,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["qkv"],
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    layer = "base_model.model.model.visual.blocks.0.attn.qkv"
    weights = {
        f"{layer}.lora_A.weight": 0.3 * torch.randn(8, hidden_size, generator=generator),
        f"{layer}.lora_B.weight": 0.3 * torch.randn(3 * hidden_size, 8, generator=generator),
    }
    save_file(weights, directory / "adapter_model.safetensors")
    return str(directory)


def test_an_adapter_of_the_encoder_is_known_by_its_path(checkpoint, tmp_path):
    """The same name loaded from another path is another adapter. Tokens are those of a stock engine that never saw the
    first one."""
    from vllm.lora.request import LoRARequest

    hidden_size = json.loads((checkpoint / "config.json").read_text())["vision_config"]["hidden_size"]
    first, second = (write_adapter(tmp_path / name, seed, hidden_size) for seed, name in enumerate(("first", "second")))
    arguments = ARGUMENTS | {
        "enable_lora": True,
        "enable_tower_connector_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": 8,
    }
    expected = []
    for adapter in (None, LoRARequest("style", 1, first), LoRARequest("style", 2, second)):
        stock = start(checkpoint, None, **arguments)
        expected += tokens(generate(stock, [prompt()], lora_request=adapter))
        stock.close()
    assert len(set(expected)) == 3

    ours = start(checkpoint, {"lane": "eager"}, **arguments)
    seen = []
    for adapter in (None, LoRARequest("style", 1, first), LoRARequest("style", 2, second)):
        seen += tokens(generate(ours, [prompt()], lora_request=adapter))
        if adapter is not None:
            ours.llm.llm_engine.remove_lora(adapter.lora_int_id)
    assert seen == expected
    assert ours.encoder_runs == 3
    # Loaded again as it was: its entry is found again.
    ours.llm.reset_prefix_cache()
    assert tokens(generate(ours, [prompt()], lora_request=LoRARequest("style", 1, first))) == expected[1:2]
    assert ours.encoder_runs == 3
    # Loaded in place, from the same path, name and id: what is there now counts.
    for file in Path(second).iterdir():
        shutil.copy(file, first)
    ours.llm.llm_engine.add_lora(LoRARequest("style", 1, first, load_inplace=True))
    assert tokens(generate(ours, [prompt()], lora_request=LoRARequest("style", 1, first))) == expected[2:]
    assert ours.encoder_runs == 4
    ours.worker.check_encoder_cache_integrity()
    ours.close()

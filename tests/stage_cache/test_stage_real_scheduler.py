"""The stage cache behind vLLM's own scheduler and batch: every row that is handed on is compared.

Nothing is computed: the content of a row is a hash of the tokens up to it, and a token that is sampled is one of the
content before it. So equal prefixes have equal rows, whoever computed them, as with a model.
"""

import json
import random
from dataclasses import dataclass, field

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed (extra 'cpu')")

import torch
from scripted import HIDDEN, WIDTH
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig, set_current_vllm_config
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from vllm_neuron_cache.simulation.stage_schedule import row_values
from vllm_neuron_cache.stage_cache import (
    FullAttentionGroupView,
    ModelCachePolicy,
    OmniPrefixCacheManager,
    PrefixCacheConfig,
    stage_prefix_cache_config,
)

pytestmark = pytest.mark.vllm

BLOCK = 4
VOCABULARY = 5
MAX_LEN = 64
MAX_RUNNING = 6
STEP_TOKENS = 24


@pytest.fixture(scope="module")
def vllm_config(tmp_path_factory):
    """Of a text model that is never made."""
    directory = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    (directory / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "vocab_size": 32,
                "max_position_embeddings": MAX_LEN,
                "torch_dtype": "float32",
            }
            | sizes
        )
    )
    model = ModelConfig(model=str(directory), skip_tokenizer_init=True, max_model_len=MAX_LEN, dtype="float32")
    config = VllmConfig(
        model_config=model,
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=STEP_TOKENS,
            max_num_seqs=MAX_RUNNING,
            max_model_len=MAX_LEN,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        ),
        device_config=DeviceConfig("cpu"),
    )
    init_none_hash(sha256)
    return config


def next_content(content, token):
    return (content * 1_000_003 + token + 1) % (1 << 45)


def contents_of(tokens, length):
    """Contents of the first `length` rows of a request that starts with these tokens and goes on by itself."""
    contents, content = [], 7
    for position in range(length):
        token = tokens[position] if position < len(tokens) else sampled_after(content)
        content = next_content(content, token)
        contents.append(content)
    return contents


def sampled_after(content):
    return content // 97 % VOCABULARY


@dataclass
class Runner:
    """Follows the scheduler as vLLM's V1 runner does, on vLLM's own batch."""

    batch: InputBatch
    states: dict[str, CachedRequestState] = field(default_factory=dict)

    def update(self, output):
        for req_id in output.finished_req_ids:
            self.states.pop(req_id, None)
            self.batch.remove_request(req_id)
        known = output.scheduled_cached_reqs
        staying = output.num_scheduled_tokens.keys() - known.resumed_req_ids
        for req_id in self.batch.req_id_to_index.keys() - staying:
            self.batch.remove_request(req_id)
        added = []
        for new in output.scheduled_new_reqs:
            if new.req_id in self.states:  # the next chunk of it
                self.batch.remove_request(new.req_id)
            self.states[new.req_id] = CachedRequestState(
                req_id=new.req_id,
                prompt_token_ids=new.prompt_token_ids,
                mm_features=[],
                sampling_params=new.sampling_params,
                generator=None,
                block_ids=new.block_ids,
                num_computed_tokens=new.num_computed_tokens,
                output_token_ids=[],
            )
            added.append(self.states[new.req_id])
        for req_id, blocks, computed in zip(known.req_ids, known.new_block_ids, known.num_computed_tokens):
            state = self.states[req_id]
            state.num_computed_tokens = computed
            if req_id in known.resumed_req_ids:
                state.block_ids = blocks
            elif blocks is not None:
                for own, more in zip(state.block_ids, blocks):
                    own.extend(more)
            index = self.batch.req_id_to_index.get(req_id)
            if index is None:
                added.append(state)
                continue
            self.batch.num_computed_tokens_cpu[index] = computed
            if blocks is not None:
                self.batch.block_table.append_row(blocks, index)
        for state in added:
            self.batch.add_request(state)
        self.batch.condense()
        self.batch.refresh_metadata()


class Engine:
    """Scheduler, runner and stage cache, one step at a time; outputs are taken up to `delay` steps late."""

    def __init__(self, config, seed, *, num_blocks, scheduler_class, inline, policy, delay):
        self.choose = random.Random(seed)
        self.delay = delay
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
        kv_cache_config = KVCacheConfig(
            num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        )
        config.cache_config.num_gpu_blocks = num_blocks
        self.scheduler = scheduler_class(
            vllm_config=config,
            kv_cache_config=kv_cache_config,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
        )
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.runner = Runner(
            InputBatch(
                max_num_reqs=MAX_RUNNING,
                max_model_len=MAX_LEN,
                max_num_batched_tokens=STEP_TOKENS,
                device=torch.device("cpu"),
                vocab_size=32,
                block_sizes=[BLOCK],
                kernel_block_sizes=[BLOCK],
                max_num_blocks_per_req=[MAX_LEN // BLOCK],
            )
        )
        cache_config = stage_prefix_cache_config(
            kv_cache_config=kv_cache_config,
            cache_config=config.cache_config,
            kv_transfer_config=None,
            scheduler_config=config.scheduler_config,
            model_config=config.model_config,
            is_pooling_model=False,
        )
        assert cache_config == PrefixCacheConfig(
            num_blocks=num_blocks, block_size=BLOCK, staging_capacity_tokens=STEP_TOKENS
        )
        self.manager = OmniPrefixCacheManager(
            cache_config, FullAttentionGroupView(self.runner.batch, BLOCK), inline=inline
        )
        self.manager.register_policy(policy)
        self.tokens: dict[str, list[int]] = {}
        self.delivered: dict[str, int] = {}
        self.hits = self.resumed = self.chunks = self.steps = self.rows = 0
        self.unused = []
        self.behind = []

    def add(self, req_id, tokens, max_tokens, resumable=False):
        request = Request(
            request_id=req_id,
            prompt_token_ids=list(tokens),
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            pooling_params=None,
            block_hasher=self.hasher,
            resumable=resumable,
        )
        if request.sampling_params is not None:
            request.sampling_params.update_from_generation_config({}, eos_token_id=None)
        self.scheduler.add_request(request)

    def step(self):
        output = self.scheduler.schedule()
        self.steps += 1
        self.manager.new_step_starts(output)
        self.runner.update(output)
        for req_id in output.finished_req_ids:
            self.delivered.pop(req_id, None)
        for new in output.scheduled_new_reqs:
            self.chunks += new.req_id in self.delivered
            self.tokens[new.req_id] = list(new.prompt_token_ids)
        self.resumed += len(output.scheduled_cached_reqs.resumed_req_ids)
        if output.total_num_scheduled_tokens:
            self.compute(output)
        self.behind.append((output, self.runner_output(output)))
        if len(self.behind) > isinstance(self.scheduler, AsyncScheduler):
            self.scheduler.update_from_output(*self.behind.pop(0))
        while len(self.unused) > self.delay:
            self.take()
        if self.steps % 16 == 0:
            self.manager.check_integrity()

    def compute(self, output):
        contents, expected = [], {}
        batch = self.runner.batch
        for index, req_id in enumerate(batch.req_ids):
            start = int(batch.num_computed_tokens_cpu[index])
            stop = start + output.num_scheduled_tokens[req_id]
            truth = contents_of(self.tokens[req_id], stop)
            contents += truth[start:stop]
            first = self.delivered.get(req_id, 0)
            self.hits += first < start
            expected[req_id] = truth[first:stop]
            self.delivered[req_id] = max(first, stop)
            self.rows += max(0, stop - first)
        assert len(contents) == output.total_num_scheduled_tokens
        hidden = torch.zeros(STEP_TOKENS, HIDDEN, dtype=torch.int64)
        hidden[: len(contents)] = torch.from_numpy(row_values(contents, HIDDEN))
        rows = torch.from_numpy(row_values(contents, WIDTH)).clone()
        step_id = self.manager.save_outputs(
            hidden, {"k": rows}, num_tokens_unpadded=len(contents), num_tokens_padded=STEP_TOKENS
        )
        hidden.fill_(-1)
        rows.fill_(-1)
        self.unused.append((step_id, expected))

    def take(self):
        step_id, expected = self.unused.pop(self.choose.randrange(len(self.unused)))
        outputs = self.manager.materialize(step_id, list(expected))
        for req_id, contents in expected.items():
            assert outputs.hidden_states[req_id].tolist() == row_values(contents, HIDDEN).tolist()
            assert outputs.mm_outputs["k"][req_id].tolist() == row_values(contents, WIDTH).tolist()

    def runner_output(self, output):
        sampled = []
        for index, req_id in enumerate(self.runner.batch.req_ids if output.num_scheduled_tokens else ()):
            stop = int(self.runner.batch.num_computed_tokens_cpu[index]) + output.num_scheduled_tokens[req_id]
            known = len(self.tokens[req_id])
            sampled.append([] if stop < known else [sampled_after(contents_of(self.tokens[req_id], stop)[-1])])
        req_ids = list(self.runner.batch.req_ids) if output.num_scheduled_tokens else []
        return ModelRunnerOutput(req_ids, {req_id: index for index, req_id in enumerate(req_ids)}, sampled)

    def close(self):
        while self.unused:
            self.take()
        self.manager.check_integrity()
        self.manager.shutdown()


def drive(config, seed, *, num_steps, sessions=False, **options):
    with set_current_vllm_config(config):
        engine = Engine(config, seed, **options)
        choose = random.Random(seed)
        trunk = [choose.randrange(VOCABULARY) for _ in range(40)]
        number = 0
        waiting: dict[str, int] = {}
        for _ in range(num_steps):
            if choose.random() < 0.5 and len(engine.scheduler.requests) < 12:
                shared = choose.choice([0, 4, 7, 8, 16, 23, 32])
                own = [choose.randrange(VOCABULARY) for _ in range(choose.randint(1, 12))]
                resumable = sessions and choose.random() < 0.3
                engine.add(f"r{number}", trunk[:shared] + own, choose.randint(1, 14), resumable)
                if resumable:
                    waiting[f"r{number}"] = choose.randint(0, 2)
                number += 1
            for req_id, request in list(engine.scheduler.requests.items()):
                if request.status == RequestStatus.WAITING_FOR_STREAMING_REQ:
                    if waiting[req_id] and request.num_tokens < 40:
                        waiting[req_id] -= 1
                        engine.add(req_id, [choose.randrange(VOCABULARY)] * choose.randint(1, 6), 3, True)
                    else:
                        engine.add(req_id, [0], 1)
            live = [req_id for req_id in engine.scheduler.requests if req_id not in waiting]
            if live and choose.random() < 0.04:
                engine.scheduler.finish_requests(choose.choice(live), RequestStatus.FINISHED_ABORTED)
            if choose.random() < 0.02 and not sessions:  # one that waits for its next chunk keeps its blocks
                engine.scheduler.reset_prefix_cache(reset_running_requests=True)
            engine.step()
        engine.close()
        return engine


@pytest.mark.parametrize("inline", [True, False], ids=["inline", "threads"])
@pytest.mark.parametrize("scheduler_class", [Scheduler, AsyncScheduler])
def test_every_row_behind_vllms_scheduler(vllm_config, scheduler_class, inline):
    hits = resumed = copied = 0
    for seed in range(4):
        engine = drive(
            vllm_config,
            seed,
            num_steps=150,
            num_blocks=(18, 28, 40)[seed % 3],
            scheduler_class=scheduler_class,
            inline=inline,
            delay=seed % 3,
            policy=ModelCachePolicy(deferred_keys=frozenset({"k"} if seed % 2 else ())),
        )
        hits += engine.hits
        resumed += engine.resumed
        copied += engine.manager.counters.rows_copied_on_write
        counters = engine.manager.counters
        assert counters.rows_absent == counters.rows_lost == counters.requests_failed == 0
        assert counters.rows_computed + counters.rows_from_cache == 2 * engine.rows
    # What this is for did happen.
    assert hits > 60 and resumed > 10
    assert copied > 0 or not inline


def test_sessions_whose_chunks_come_one_after_another(vllm_config):
    """vLLM's streaming input: the same id among the new requests again, with what it computed itself."""
    chunks = hits = 0
    for seed in range(3):
        engine = drive(
            vllm_config,
            seed,
            num_steps=150,
            num_blocks=60,
            scheduler_class=Scheduler,
            inline=True,
            delay=seed % 3,
            policy=ModelCachePolicy(),
            sessions=True,
        )
        chunks += engine.chunks
        hits += engine.hits
    assert chunks > 10 and hits > 20

"""An engine core without a model: vLLM's scheduler, real in all its parts, and a simulated worker."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.config.ec_manager_config import EncoderCacheManagerConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from vllm_neuron_cache.demo.checkpoint import build_checkpoint
from vllm_neuron_cache.encoder_cache.sizing import CacheGeometry
from vllm_neuron_cache.integrations.vllm.activation import MANAGER_CLS, SCHEDULER_CLS
from vllm_neuron_cache.integrations.vllm.scheduler import compose
from vllm_neuron_cache.integrations.vllm.simulation.workers import BlockWorker, StockWorker
from vllm_neuron_cache.simulation.trace import TraceRequest

_LONGEST_PROMPT = 1 << 20


@dataclass(frozen=True, kw_only=True)
class SimulatedEngineConfig:
    """What an engine is started with. Sizes are in tokens unless a name says blocks."""

    geometry: CacheGeometry
    """The cache. Under vLLM's own manager: what the device has, of which that manager knows nothing."""
    stock: bool = False
    """Whether vLLM's own manager decides, instead of this cache's."""
    largest_item_tokens: int
    """Of the largest legal item; vLLM raises its budgets to it."""
    max_num_batched_tokens: int = 512
    """Of a step; also vLLM's budgets for encoding in a step and for its cache."""
    max_num_seqs: int = 16
    num_kv_blocks: int = 4096
    kv_block_size: int = 16
    prefix_caching: bool = False
    asynchronous: bool = False
    """Whether vLLM's asynchronous scheduler is used, which plans ahead of what is sampled."""
    eviction: str = "lru"


class SimulatedEngine:
    """One scheduler and one worker, stepped by hand.

    A step is made by `schedule`, done by `execute` and taken in by `take_output`; each takes the oldest step that is
    ready for it, so that several can be in flight. All three change the engine, and so do `add`, `abort` and resets.
    """

    def __init__(self, config: SimulatedEngineConfig, fails: Callable[[str], bool] = lambda key: False) -> None:
        """`fails` as in `BlockWorker`."""
        self.config = config
        vllm_config = _vllm_config(config)
        base = AsyncScheduler if config.asynchronous else Scheduler
        self.scheduler = (base if config.stock else compose(base))(
            vllm_config=vllm_config,
            kv_cache_config=_kv_cache_config(config),
            structured_output_manager=_base_config()[1],
            block_size=config.kv_block_size,
            mm_registry=_Registry(config.largest_item_tokens),
        )
        self.worker = StockWorker(config.geometry) if config.stock else BlockWorker(config.geometry, fails)
        self._hasher = get_request_block_hasher(config.kv_block_size, sha256) if config.prefix_caching else None
        self._scheduled: deque[Any] = deque()
        self._executed: deque[tuple[Any, Any]] = deque()
        self.outputs: dict[str, list[int]] = {}
        """Tokens by request id."""
        self.finish_reasons: dict[str, str] = {}
        """Of requests that have ended."""

    @property
    def manager(self) -> Any:
        return self.scheduler.encoder_cache_manager

    @property
    def num_in_flight(self) -> int:
        return len(self._scheduled) + len(self._executed)

    @property
    def has_requests(self) -> bool:
        return self.scheduler.has_unfinished_requests()

    def add(self, request: TraceRequest) -> None:
        self.outputs[request.request_id] = []
        self.scheduler.add_request(vllm_request(request, self._hasher))

    def abort(self, request_id: str) -> None:
        """Ends a request from outside; one that has ended already is no error."""
        if request_id in self.scheduler.requests:
            self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
            self.finish_reasons[request_id] = "abort"

    def schedule(self) -> int:
        """Makes a step. Returns how many tokens are in it; a step without any is made all the same."""
        step = self.scheduler.schedule()
        self._scheduled.append(step)
        return step.total_num_scheduled_tokens

    def drop_empty_step(self) -> bool:
        """Loses the step made last, with its metadata, if there is no token in it. Returns whether it did."""
        if (
            not self._scheduled
            or self._scheduled[-1].total_num_scheduled_tokens
            or self._scheduled[-1].finished_req_ids
        ):
            return False
        self._scheduled.pop()
        return True

    def execute(self) -> bool:
        """Has the worker do the oldest step that it has not done. Returns whether there was one."""
        if not self._scheduled:
            return False
        step = self._scheduled.popleft()
        self._executed.append((step, self.worker.execute(step)))
        return True

    def take_output(self) -> bool:
        """Has the scheduler take in the oldest output. Returns whether there was one."""
        if not self._executed:
            return False
        step, output = self._executed.popleft()
        for outputs in self.scheduler.update_from_output(step, output).values():
            for ended in outputs.outputs:
                self.outputs[ended.request_id] += ended.new_token_ids
                if ended.finish_reason is not None:
                    self.finish_reasons[ended.request_id] = str(ended.finish_reason)
        return True

    def reset_encoder_cache(self) -> None:
        """As the engine core does: the worker's half, and the scheduler's."""
        if not self.config.stock:
            self.worker.lose_rows()
            self.scheduler.follow_workers([self.worker.epochs])
        self.scheduler.reset_encoder_cache()

    def drain(self) -> None:
        """Has everything in flight done and taken in."""
        while self.execute() or self.take_output():
            pass

    def check_integrity(self) -> None:
        """Raises `IntegrityError` if the books of the two sides disagree. With steps in flight, or losses of the worker
        that it has not told of yet, each side is checked by itself."""
        if not self.config.stock:
            self.worker.table.check_integrity()
            apart = self.num_in_flight or self.worker.epochs != self.manager.worker_epochs
            self.manager.check_integrity([] if apart else [self.worker.entries()])


def vllm_request(request: TraceRequest, hasher: Any = None) -> Request:
    """vLLM's own request object, as its front end would have made it; pixels are not there."""
    # Text that a prefix cache finds, or text of the request's own.
    own = hash(request.request_id) % 1_000_000 + 1000
    tokens: list[int] = []
    features = []
    for index, (length, item) in enumerate(zip(request.text_tokens, request.items)):
        tokens += [1 if index < request.shared_prefix else own] * length
        mask = _frame_mask(item.frame_tokens)
        num_placeholders = item.num_tokens if mask is None else len(mask)
        features.append(
            MultiModalFeatureSpec(
                data=None,
                modality=item.modality,
                identifier=item.key,
                mm_hash=item.key,
                mm_position=PlaceholderRange(offset=len(tokens), length=num_placeholders, is_embed=mask),
            )
        )
        tokens += [2] * num_placeholders
    tokens += [own] * request.text_tokens[-1]
    sampling = SamplingParams(max_tokens=request.max_tokens, ignore_eos=True)
    sampling.update_from_generation_config({}, eos_token_id=None)
    return Request(
        request_id=request.request_id,
        prompt_token_ids=tokens,
        sampling_params=sampling,
        pooling_params=None,
        mm_features=features,
        block_hasher=hasher,
    )


def play(engine: SimulatedEngine, requests: Sequence[TraceRequest], *, depth: int = 1, patience: int = 50) -> int:
    """Plays a trace to its end, with `depth` steps in flight. Returns how often the engine stood still.

    It stands still when nothing is in flight, requests are there, and a pass schedules none of them. After `patience`
    such passes in a row it gives up, and leaves the requests unfinished.
    """
    arriving = deque(requests)
    num_stalled = stalled_in_a_row = 0
    for number in range(1 << 30):
        while arriving and arriving[0].arrival <= number:
            engine.add(arriving.popleft())
        if not engine.has_requests:
            if not arriving:
                break
            continue
        idle = engine.num_in_flight == 0
        num_tokens = engine.schedule()
        while engine.num_in_flight >= (depth if num_tokens else 1):
            engine.execute()
            engine.take_output()
        stalled_in_a_row = stalled_in_a_row + 1 if idle and not num_tokens else 0
        num_stalled += bool(stalled_in_a_row)
        if stalled_in_a_row >= patience:
            break
    engine.drain()
    return num_stalled


def _frame_mask(frame_tokens: Iterable[int]) -> torch.Tensor | None:
    """Which placeholders of a video take rows: its frames, with one other token between each two."""
    frames = list(frame_tokens)
    if len(frames) < 2:
        return None
    mask = [True] * frames[0]
    for length in frames[1:]:
        mask += [False] + [True] * length
    return torch.tensor(mask)


# Configuration -------------------------------------------------------------------------------------------------


class _ProcessorInfo:
    def __init__(self, largest_item_tokens: int) -> None:
        self._largest_item_tokens = largest_item_tokens
        self.supported_mm_limits = {"image": None}
        self.allowed_mm_limits = {"image": 1 << 10}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Any) -> dict[str, int]:
        return {"image": self._largest_item_tokens}


class _Processor:
    def __init__(self, info: _ProcessorInfo) -> None:
        self.info = info


class _Registry:
    """Stands in for a model's processor, of which a scheduler asks only how large an item can be."""

    def __init__(self, largest_item_tokens: int) -> None:
        self._processor = _Processor(_ProcessorInfo(largest_item_tokens))

    def supports_multimodal_inputs(self, model_config: Any) -> bool:
        return True

    def create_processor(self, model_config: Any, cache: Any = None) -> _Processor:
        return self._processor

    def processor_only_cache_from_config(self, vllm_config: Any) -> None:
        return None


@cache
def _base_config() -> tuple[VllmConfig, StructuredOutputManager]:
    """A configuration of vLLM's, of which each engine changes a copy; to make one takes seconds."""
    config = EngineArgs(
        model=str(build_checkpoint()), max_model_len=1 << 15, max_num_batched_tokens=1 << 15
    ).create_engine_config()
    init_none_hash(sha256)
    return config, StructuredOutputManager(config)


def _vllm_config(config: SimulatedEngineConfig) -> VllmConfig:
    vllm_config = copy(_base_config()[0])
    vllm_config.model_config = copy(vllm_config.model_config)
    vllm_config.model_config.max_model_len = _LONGEST_PROMPT
    scheduler = vllm_config.scheduler_config = copy(vllm_config.scheduler_config)
    scheduler.max_num_batched_tokens = config.max_num_batched_tokens
    scheduler.max_num_encoder_input_tokens = config.max_num_batched_tokens
    scheduler.encoder_cache_size = config.max_num_batched_tokens
    scheduler.max_num_seqs = config.max_num_seqs
    scheduler.async_scheduling = config.asynchronous
    vllm_config.cache_config = copy(vllm_config.cache_config)
    vllm_config.cache_config.num_gpu_blocks = config.num_kv_blocks
    vllm_config.cache_config.block_size = config.kv_block_size
    vllm_config.cache_config.enable_prefix_caching = config.prefix_caching
    if not config.stock:
        scheduler.scheduler_cls = SCHEDULER_CLS
        vllm_config.additional_config = {"vllm_neuron_cache": {"eviction": config.eviction}}
        vllm_config.ec_manager_config = EncoderCacheManagerConfig(
            encoder_cache_manager_cls=MANAGER_CLS, manager_config=config.geometry._asdict()
        )
    return vllm_config


def _kv_cache_config(config: SimulatedEngineConfig) -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=config.kv_block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return KVCacheConfig(
        num_blocks=config.num_kv_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )

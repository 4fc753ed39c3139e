"""vLLM's encoder-cache manager, accounting in blocks."""

import time
from collections.abc import Callable, Container, Iterable, Mapping, Set

from vllm.config import VllmConfig
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.request import Request

from vllm_neuron_cache.config import NeuronCacheConfig
from vllm_neuron_cache.encoder_cache.eviction import POLICIES, EvictionPolicy
from vllm_neuron_cache.encoder_cache.item import ItemLayout, dense_layout, num_dense_blocks
from vllm_neuron_cache.encoder_cache.metrics import CacheCounters, PoolGauges
from vllm_neuron_cache.encoder_cache.pool import EncoderBlockPool, ItemState, PoolItem
from vllm_neuron_cache.encoder_cache.report import WorkerEntry, WorkerEpochs
from vllm_neuron_cache.encoder_cache.sizing import CacheGeometry
from vllm_neuron_cache.encoder_cache.steps import StepJournal
from vllm_neuron_cache.errors import ConfigurationError, IntegrityError
from vllm_neuron_cache.integrations.vllm.geometry import placeholder_layout, resolve_geometry
from vllm_neuron_cache.integrations.vllm.metadata import BlockCacheMetadata

_NO_INPUTS: Set[int] = frozenset()
_SAMPLE_EVERY = 8
"""To tell the time of every item would cost a tenth of the manager's own. vLLM samples its KV blocks likewise."""


class BlockEncoderCacheManager(EncoderCacheManager):
    """The scheduler's side of the encoder cache: who may be encoded, where the rows go, what is evicted.

    It keeps its own state and overrides every method by which vLLM's scheduler changes that of the base class, because
    the base class differs inside between vLLM versions. It must be driven by a scheduler with `BlockSchedulerMixin`:
    alone it would never learn that a step finished.
    """

    @classmethod
    def create_manager(cls, *, cache_size: int, vllm_config: VllmConfig) -> EncoderCacheManager:
        """Called by vLLM's scheduler. `cache_size` is its budget in token rows."""
        from vllm_neuron_cache.integrations.vllm.scheduler import acknowledges_steps

        if not acknowledges_steps(vllm_config.scheduler_config.get_scheduler_cls()):
            raise ConfigurationError(
                f"{cls.__name__} needs a scheduler that acknowledges its steps. Add --scheduler-cls "
                "vllm_neuron_cache.integrations.vllm.scheduler.block_scheduler, or turn everything on with "
                "additional_config={'vllm_neuron_cache': {}}."
            )
        config = NeuronCacheConfig.from_additional_config(vllm_config.additional_config)
        return cls(
            resolve_geometry(vllm_config),
            cache_size,
            min_hold_ms=config.encoder.encoder_cache_min_hold_time_ms or 0,
            policy=POLICIES[config.eviction](),
        )

    def __init__(
        self,
        geometry: CacheGeometry,
        cache_size: int,
        *,
        min_hold_ms: int = 0,
        clock: Callable[[], float] = time.monotonic,
        policy: EvictionPolicy | None = None,
    ) -> None:
        """`min_hold_ms`, `clock` and `policy` as in `EncoderBlockPool`."""
        super().__init__(cache_size)
        self.geometry = geometry
        self.stats = CacheCounters()
        self._pool = EncoderBlockPool(
            geometry.num_item_blocks, min_hold_ms=min_hold_ms, clock=clock, policy=policy, sample_every=_SAMPLE_EVERY
        )
        self._journal = StepJournal()
        self.worker_epochs = WorkerEpochs()
        # Request id -> ids of its inputs that it refers to.
        self._inputs: dict[str, set[int]] = {}
        # What requests did in the pass that is being made: references taken and items reserved.
        self._taken: list[tuple[Request, int]] = []
        self._reserved: list[tuple[Request, int]] = []
        # Layouts of items with frames; those of dense items are cheaper to make than to find.
        self._frame_layouts: dict[str, ItemLayout] = {}
        self._freed: list[str] = []
        # Inputs that found no room, (request id, input id), until they have it or their request ends.
        self._waiting: set[tuple[str, int]] = set()

    @property
    def pool(self) -> EncoderBlockPool:
        """For reading only."""
        return self._pool

    # Called by vLLM's scheduler --------------------------------------------------------------------------------

    def check_and_update_cache(self, request: Request, input_id: int) -> bool:
        """Whether the item is there, or will be when this pass's step runs. If so the request refers to it.

        An item of the same key and another size is not the request's: a client gave one id to two things.
        """
        feature = request.mm_features[input_id]
        key = feature.identifier
        item = self._pool.get(key)
        if item is None or item.num_tokens != feature.mm_position.get_num_embeds():
            return False
        request_id = request.request_id
        inputs = self._inputs.get(request_id)
        if inputs is None:
            inputs = self._inputs[request_id] = set()
        if input_id not in inputs:
            inputs.add(input_id)
            if self._pool.refer(key, request_id):
                self.stats.of(feature.modality).hits += 1
                self._taken.append((request, input_id))
        return True

    def can_allocate(
        self, request: Request, input_id: int, encoder_compute_budget: int, num_embeds_to_schedule: int
    ) -> bool:
        """Whether the item can be encoded in this pass; evicts to make room for it.

        vLLM passes the items accepted before this one as an unrounded sum of rows; their blocks are counted again
        here, item by item.
        """
        feature = request.mm_features[input_id]
        if feature.mm_position.get_num_embeds() > encoder_compute_budget:
            return False
        homonym = self._pool.get(feature.identifier)
        if homonym is not None:
            # Of another size, or it would have been a hit. It has to go first, and waits for those who read it.
            if homonym.state is ItemState.RESERVED or homonym.references:
                return False
            self._note_eviction(self._pool.invalidate(feature.identifier, last_step=self._last_step_made))
        num_blocks = self._num_blocks(feature) + self._num_pending_blocks(request, input_id, num_embeds_to_schedule)
        if not self._pool.can_reserve(num_blocks):
            self._note_wait(request, input_id)
            return False
        if num_blocks > self._pool.num_free_blocks:
            for item in self._pool.make_room(num_blocks, last_step=self._last_step_made):
                self._note_eviction(item)
        if num_blocks > self._pool.num_free_blocks:
            # Blocks that somebody may still be reading come free in a later pass.
            self._note_wait(request, input_id)
            return False
        return True

    def allocate(self, request: Request, input_id: int) -> None:
        """Reserves the item's blocks for the step that is being made. `can_allocate` has made the room."""
        feature = request.mm_features[input_id]
        item = self._pool.reserve(
            feature.identifier,
            self._layout(feature),
            reference=request.request_id,
            step=self._journal.open_seq,
            modality=feature.modality,
        )
        self._journal.record_allocation(item)
        self._inputs.setdefault(request.request_id, set()).add(input_id)
        self._reserved.append((request, input_id))
        self.stats.of(feature.modality).misses += 1
        if self._waiting:
            self._waiting.discard((request.request_id, input_id))

    def get_cached_input_ids(self, request: Request) -> Set[int]:
        return self._inputs.get(request.request_id, _NO_INPUTS)

    def free_encoder_input(self, request: Request, input_id: int) -> None:
        """Drops one input of a request. The item stays referred to while another input of the request is the same."""
        inputs = self._inputs.get(request.request_id)
        if inputs is None or input_id not in inputs:
            return
        inputs.discard(input_id)
        key = request.mm_features[input_id].identifier
        if not any(request.mm_features[other].identifier == key for other in inputs):
            self._pool.release(key, request.request_id)
        if not inputs:
            del self._inputs[request.request_id]

    def free(self, request: Request) -> None:
        """Drops every reference of a request, at its end or when it is preempted."""
        for input_id in sorted(self._inputs.get(request.request_id, ())):
            self.free_encoder_input(request, input_id)
        if self._frame_layouts:
            for feature in request.mm_features:
                self._frame_layouts.pop(feature.identifier, None)
        if self._waiting:
            self._waiting.difference_update(
                [(request.request_id, input_id) for input_id in range(len(request.mm_features))]
            )

    def get_freed_mm_hashes(self) -> list[str]:
        """Keys evicted in this pass and not allocated again in it, for whoever reads vLLM's own list."""
        if not self._freed:
            return []
        freed, self._freed = self._freed, []
        return [key for key in freed if self._pool.get(key) is None]

    def get_manager_metadata(self) -> BlockCacheMetadata:
        """Closes the pass; vLLM calls it once per `schedule`, last."""
        return BlockCacheMetadata(self._journal.close_step(), self.worker_epochs)

    def reset(self) -> None:
        """Forgets everything. What running requests still need is encoded again."""
        self._pool.clear(last_step=self._last_step_made)
        self._journal.record_reset()
        self._inputs.clear()
        self._taken.clear()
        self._reserved.clear()
        self._freed.clear()
        self._frame_layouts.clear()
        self._waiting.clear()

    # Called by BlockSchedulerMixin -----------------------------------------------------------------------------

    def end_pass(self, scheduled: Container[str], encoder_inputs: dict[str, list[int]]) -> None:
        """Undoes what requests did in the pass that are not part of its step after all.

        Args:
            scheduled: ids of the requests in the step.
            encoder_inputs: what the step encodes, input ids by request id; may get an entry more, see below.

        A request that took a reference and was then not scheduled drops it: what waits must not hold what runs.

        A request that reserved an item and was preempted later in the pass will not encode it. If a request in the
        step reads the item, that one encodes it instead; otherwise the reservation is rolled back.
        """
        if not self._taken and not self._reserved:
            return
        readers: dict[str, tuple[str, int]] = {}
        for request, input_id in self._taken:
            key = request.mm_features[input_id].identifier
            if request.request_id in scheduled:
                readers[key] = request.request_id, input_id
                continue
            self.stats.of(request.mm_features[input_id].modality).hits -= 1
            for held in sorted(self._inputs.get(request.request_id, ())):
                if request.mm_features[held].identifier == key:
                    self.free_encoder_input(request, held)
        for request, input_id in self._reserved:
            if input_id not in encoder_inputs.get(request.request_id, ()):
                self._encode_elsewhere_or_roll_back(request.mm_features[input_id].identifier, readers, encoder_inputs)
        self._taken.clear()
        self._reserved.clear()

    def _encode_elsewhere_or_roll_back(
        self, key: str, readers: dict[str, tuple[str, int]], encoder_inputs: dict[str, list[int]]
    ) -> None:
        if key in readers:
            request_id, input_id = readers[key]
            encoder_inputs.setdefault(request_id, []).append(input_id)
            return
        item = self._pool.roll_back(key)
        self.stats.of(item.modality).misses -= 1
        self._journal.record_eviction(item)

    def _note_eviction(self, item: PoolItem) -> None:
        self.stats.of(item.modality).evictions += 1
        self._freed.append(item.key)
        self._journal.record_eviction(item)

    def _note_wait(self, request: Request, input_id: int) -> None:
        if (request.request_id, input_id) not in self._waiting:
            self._waiting.add((request.request_id, input_id))
            self.stats.of(request.mm_features[input_id].modality).waits += 1

    def gauges(self) -> PoolGauges:
        """The pool as it is now; for whoever exports it."""
        num_rows = self._pool.num_used_blocks * self.geometry.block_size
        return PoolGauges(
            blocks=self._pool.blocks_by_state(),
            num_items=self._pool.num_items,
            num_tokens=self._pool.num_tokens,
            padding_waste=1 - self._pool.num_tokens / num_rows if num_rows else 0.0,
        )

    def acknowledge(self, metadata: BlockCacheMetadata) -> None:
        """The step that `metadata` belongs to has come back from the workers."""
        seq = metadata.step.seq
        self._journal.acknowledge(seq)
        self._pool.acknowledge(seq)

    @property
    def last_step_in_flight(self) -> int | None:
        """Number of the last step made, unless it has come back."""
        return self._last_step_made if self._journal.num_in_flight else None

    @property
    def _last_step_made(self) -> int:
        return self._journal.open_seq - 1

    def follow_workers(self, epochs: WorkerEpochs) -> None:
        """The workers have dropped their rows: forgets everything, as `reset`."""
        self.worker_epochs = epochs
        self.reset()

    def invalidate(self, key: str, seq: int, requests: Mapping[str, Request]) -> None:
        """Forgets an item that workers could not write, or not read, in step `seq`, unless it was reserved again since.

        Requests that refer to it lose the reference, and encode the item again if they still need it.
        """
        item = self._pool.get(key)
        if item is None or item.reserved_in > seq:
            return
        for request_id in tuple(item.references):
            request = requests[request_id]
            for input_id in sorted(self._inputs[request_id]):
                if request.mm_features[input_id].identifier == key:
                    self.free_encoder_input(request, input_id)
        self.stats.of(item.modality).invalidations += 1
        self._journal.record_eviction(self._pool.invalidate(key, last_step=self._last_step_made))

    def check_integrity(self, ranks: Iterable[Iterable[WorkerEntry]] = ()) -> None:
        """Raises `IntegrityError` if pool, journal and references disagree, or if one of the `ranks` lacks an entry, as
        the pool has it, of an item whose write it has acknowledged. Changes nothing."""
        self._pool.check_integrity()
        self._journal.check_integrity()
        referring = {request_id for item in self._pool.items() for request_id in item.references}
        if referring != set(self._inputs):
            raise IntegrityError(f"requests that items name: {referring}; requests with inputs: {set(self._inputs)}")
        written = {
            WorkerEntry(item.key, item.generation, item.block_ids, True)
            for item in self._pool.items()
            if item.state is not ItemState.RESERVED
        }
        for rank, entries in enumerate(ranks):
            missing = written - {WorkerEntry(*entry) for entry in entries}
            if missing:
                raise IntegrityError(f"rank {rank} lacks entries that the pool has: {sorted(missing)}")

    # Sizes -----------------------------------------------------------------------------------------------------

    def _num_blocks(self, feature: MultiModalFeatureSpec) -> int:
        position = feature.mm_position
        if position.is_embed is None:
            return num_dense_blocks(position.length, self.geometry.block_size)
        return self._layout(feature).num_blocks

    def _layout(self, feature: MultiModalFeatureSpec) -> ItemLayout:
        position = feature.mm_position
        if position.is_embed is None:
            return dense_layout(position.length, self.geometry.block_size)
        if feature.modality != "video":
            return placeholder_layout(feature.modality, position, self.geometry)
        layout = self._frame_layouts.get(feature.identifier)
        if layout is None or layout.num_tokens != feature.mm_position.get_num_embeds():
            layout = placeholder_layout(feature.modality, feature.mm_position, self.geometry)
            self._frame_layouts[feature.identifier] = layout
        return layout

    def _num_pending_blocks(self, request: Request, input_id: int, num_embeds: int) -> int:
        """Blocks of the items before `input_id` that vLLM has accepted in this pass: `num_embeds` rows in all."""
        if not num_embeds:
            return 0
        num_blocks = 0
        seen: set[str] = set()
        for feature in reversed(request.mm_features[:input_id]):
            if num_embeds <= 0:
                break
            if feature.identifier in seen or self._pool.get(feature.identifier) is not None:
                continue
            seen.add(feature.identifier)
            num_embeds -= feature.mm_position.get_num_embeds()
            num_blocks += self._num_blocks(feature)
        return num_blocks

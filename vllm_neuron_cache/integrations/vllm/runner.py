"""The model runner's part: apply steps, write encoder outputs, and merge cached rows, through vLLM's own seams."""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from vllm.config.multimodal import AudioDummyOptions, ImageDummyOptions, VideoDummyOptions
from vllm.logger import init_logger
from vllm.model_executor.models.interfaces import SupportsMultiModal
from vllm.model_executor.models.qwen2_5_omni_thinker import Qwen2_5OmniThinkerForConditionalGeneration
from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration
from vllm.multimodal.utils import get_mm_features_in_window
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

from vllm_neuron_cache.config import NeuronCacheConfig
from vllm_neuron_cache.encoder_cache.read_plan import ReadPlan, ReadWindow
from vllm_neuron_cache.encoder_cache.report import ReportBuilder, RequestFailure, WorkerEpochs
from vllm_neuron_cache.errors import (
    ConfigurationError,
    EncoderCacheReadError,
    EncoderOutputError,
    RequestError,
    StepProtocolError,
)
from vllm_neuron_cache.graphs.lanes import make_lane
from vllm_neuron_cache.integrations.vllm.compiled_encoder import CompiledEncoders, CompiledItem, without
from vllm_neuron_cache.integrations.vllm.geometry import resolve_geometry
from vllm_neuron_cache.integrations.vllm.metadata import BlockCacheMetadata, attach_report
from vllm_neuron_cache.integrations.vllm.prefill import merge_in_forward
from vllm_neuron_cache.runtime import EncoderCacheRuntime, MergeTargets
from vllm_neuron_cache.source_rows import SourceRows

logger = init_logger("vllm.neuron_cache")

# Small enough to encode in no time, large enough for every processor's lower limit.
_PROBES = {
    "audio": AudioDummyOptions(count=1, length=16000),
    "image": ImageDummyOptions(count=1, width=64, height=64),
    "video": VideoDummyOptions(count=1, num_frames=2, width=64, height=64),
}

# Ways of merging that amount to overwriting placeholder rows, and the same rows of each deepstack level's buffer, with
# those of the item that each belongs to. A list, because trying a model's merge out would not show what it keeps for
# layers further on (where the placeholders were, for one).
_KNOWN_MERGES = (
    SupportsMultiModal.embed_input_ids,
    Qwen2_5OmniThinkerForConditionalGeneration.embed_input_ids,
    Qwen3VLForConditionalGeneration.embed_input_ids,
)


class BlockRunnerMixin:
    """Over vLLM's V1 `GPUModelRunner` and its descendants.

    vLLM gathers embeddings into new tensors and hands them to the model's `embed_input_ids`. Here the gather makes a
    plan only, the model embeds text alone, and the merge graph then writes the cached rows over the placeholders, in
    tensors that this class owns and that the model and vLLM see as views.
    """

    _encoder_width: int | None = None

    def load_lora_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        # Afterwards the encoder's layers cannot run before a step has told them which adapter is whose.
        self._encoder_width = self._measure_encoder_width()
        return super().load_lora_model(model, *args, **kwargs)

    def init_block_encoder_cache(self) -> None:
        """Measures the width of a row, allocates the buffer, and takes over the tensors that the merge writes.

        Call once, after the weights are loaded and before anything is compiled.
        Raises `ConfigurationError` for a model whose way of merging, or a modality, is not known here.
        """
        geometry = resolve_geometry(self.vllm_config)
        fat_dim = self._encoder_width or self._measure_encoder_width()
        config = NeuronCacheConfig.from_additional_config(self.vllm_config.additional_config)
        num_levels = self._require_known_merge(fat_dim)
        self._source_rows = SourceRows(self.max_num_tokens, self.device) if config.compiled_prefill else None
        targets = self._source_rows or self._take_over_merge_targets(num_levels)
        self._encoder_runtime = EncoderCacheRuntime(
            geometry,
            fat_dim=fat_dim,
            dtype=self.dtype,
            device=self.device,
            targets=targets,
            lane=make_lane(config.lane, config.kernel),
        )
        if self._source_rows is not None:
            self._merge_in_forward()
        self._compiled_encoders: CompiledEncoders | None = None
        if config.compiled_encoder:
            self._compiled_encoders = CompiledEncoders(
                self.model, self._encoder_runtime, self.vllm_config, config.encoder.encoder_attention_block_size
            )
        self._read_plan: ReadPlan | None = None
        self._report = ReportBuilder()
        self._follow_weights()
        self.encoder_cache = _ProfilingOutputs(fat_dim)
        logger.info(
            "Encoder cache: %d blocks (one is scratch) of %d rows of %d %s, %.1f MiB; lane %s, buckets %s",
            geometry.num_blocks,
            geometry.block_size,
            fat_dim,
            str(self.dtype).removeprefix("torch."),
            self._encoder_runtime.blocks.num_bytes / 2**20,
            config.lane,
            ", ".join(f"{g.spec.name} {'/'.join(map(str, g.buckets))}" for g in self._encoder_runtime.graphs),
        )

    @torch.inference_mode()
    def warm_up_block_encoder_cache(self) -> None:
        """Compiles every graph in every bucket; nothing compiles after. The mode is that of `execute_model`."""
        self._encoder_runtime.warm_up()

    @property
    def encoder_runtime(self) -> EncoderCacheRuntime:
        return self._encoder_runtime

    # vLLM's seams ----------------------------------------------------------------------------------------------

    def _process_encoder_cache_scheduler_output(self, scheduler_output: Any) -> None:
        metadata = scheduler_output.ec_manager_metadata
        if not isinstance(metadata, BlockCacheMetadata):
            raise StepProtocolError(
                f"the scheduler sent {type(metadata).__name__} where the encoder cache's step was expected: scheduler "
                "and worker are configured differently. Turn both on with additional_config={'vllm_neuron_cache': {}}."
            )
        for restored in metadata.restored:
            self.requests[restored.request_id].mm_features[restored.input_id] = restored.feature
        self._report.start_step(metadata.worker_epochs)
        self._encoder_runtime.apply(metadata.step)

    def _execute_mm_encoder(self, scheduler_output: Any) -> list[torch.Tensor]:
        """Encodes all items of the step together; if that fails, each by itself, so that only the guilty one fails."""
        try:
            return self._encode(scheduler_output)
        except Exception as error:
            if not self._only_an_item_failed(error):
                self._log_items_of_failed_encoder(scheduler_output, error)
                raise
        outputs = []
        for request_id, input_ids in scheduler_output.scheduled_encoder_inputs.items():
            for input_id in input_ids:
                alone = replace(scheduler_output, scheduled_encoder_inputs={request_id: [input_id]})
                try:
                    outputs += self._encode(alone)
                except Exception as error:
                    if not self._only_an_item_failed(error):
                        raise
                    feature = self.requests[request_id].mm_features[input_id]
                    self._encoder_runtime.fail(
                        feature.identifier,
                        f"item {feature.identifier} ({feature.modality}, {feature.mm_position.get_num_embeds()} rows): "
                        f"the encoder raised {type(error).__name__}: {error}",
                    )
                    self._report.fail_item(feature.identifier)
        return outputs

    def _encode(self, scheduler_output: Any) -> list[torch.Tensor]:
        """Encodes what has a compiled encoder, which writes rows by itself, and has vLLM do the others. Returns the
        output of those."""
        if self._compiled_encoders is not None and scheduler_output.scheduled_encoder_inputs:
            items = self._compiled_encoders.of_step(self.requests, scheduler_output)
            self.encode_compiled(items)
            scheduler_output = without(scheduler_output, items)
        return super()._execute_mm_encoder(scheduler_output)

    def encode_compiled(self, items: Sequence[CompiledItem]) -> None:
        encoders = dict.fromkeys(item.encoder for item in items)
        for encoder in encoders:
            own = [item for item in items if item.encoder is encoder]
            refs = [(item.request_id, None) for item in own]
            with self.timed_encoder_operation(self._times_encoder, refs, 0, len(own)):
                for key in self._encoder_runtime.encode(encoder, {item.key: item.item for item in own}):
                    self._report.fail_item(key)

    @property
    def _times_encoder(self) -> bool:
        return bool(self.observability_config and self.observability_config.enable_mm_processor_stats)

    def _cache_encoder_output(self, mm_hash: str, output: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        try:
            self._encoder_runtime.write(mm_hash, output)
        except EncoderOutputError:
            self._report.fail_item(mm_hash)

    def _gather_mm_embeddings(
        self, scheduler_output: Any, shift_computed_tokens: int = 0
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Plans the step's reads. Returns no embeddings, so that the model embeds text alone."""
        # Only a drafter reads ahead, and speculative decoding is refused at start-up.
        assert not shift_computed_tokens, shift_computed_tokens
        num_step_tokens = scheduler_output.total_num_scheduled_tokens
        windows = self._read_windows(scheduler_output)
        if not windows:
            return [], torch.zeros(num_step_tokens, dtype=torch.bool)
        self._read_plan = self._plan_reads(windows, num_step_tokens)
        return [], torch.from_numpy(self._read_plan.is_embed)

    def _prepare_mm_inputs(self, num_tokens: int) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Called when text is embedded and copied into `inputs_embeds`: the cached rows go over it now.

        Where the model merges in its own forward, embeddings are of width 0, and it gets the rows to take instead.
        """
        if self._read_plan is not None:
            plan, self._read_plan = self._read_plan, None
            self._encoder_runtime.merge(plan)
            if self._has_deepstack and self._source_rows is None:
                # The model adds, and then clears, this many rows of its deepstack buffers.
                self.model.deepstack_input_embeds_num_tokens = len(plan.is_embed)
        input_ids, inputs_embeds = super()._prepare_mm_inputs(num_tokens)
        return input_ids, inputs_embeds if self._source_rows is None else self._source_rows.take(num_tokens)

    def profile_run(self) -> None:
        """Runs, and so compiles, the forward for steps of text; then that with the merge, if it is another one."""
        super().profile_run()
        if self._source_rows is not None:
            self._source_rows.fill_with_text()
            self._dummy_run(self.max_num_tokens, is_profile=True)

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_report(super().execute_model(*args, **kwargs))

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_report(super().sample_tokens(*args, **kwargs))

    def add_lora(self, lora_request: Any) -> bool:
        # Loaded in place, an adapter keeps name and id, and often the path.
        if getattr(lora_request, "load_inplace", False) and self.lora_config.enable_tower_connector_lora:
            self.note_weights_changed()
        return super().add_lora(lora_request)

    def reset_encoder_cache(self) -> None:
        super().reset_encoder_cache()
        self.note_rows_lost()

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        self.note_weights_changed()
        super().reload_weights(*args, **kwargs)

    # Our own ---------------------------------------------------------------------------------------------------

    @property
    def encoder_cache_epochs(self) -> WorkerEpochs:
        return self._report.epochs

    def note_rows_lost(self) -> None:
        """Drops every entry, without the scheduler having said so. It is told with the output of the next step."""
        self._encoder_runtime.clear()
        self._report.note_rows_lost()

    def note_weights_changed(self) -> None:
        """Drops every entry, because the encoder would not write the same rows again."""
        self._encoder_runtime.clear()
        if self._compiled_encoders is not None:
            self._compiled_encoders.forget_weights()
        self._report.note_weights_changed()

    def _follow_weights(self) -> None:
        """Whoever loads weights into the model calls this method of it, however they came to it."""
        load_weights = self.model.load_weights

        def load(*args: Any, **kwargs: Any) -> Any:
            self.note_weights_changed()
            return load_weights(*args, **kwargs)

        self.model.load_weights = load

    def _only_an_item_failed(self, error: Exception) -> bool:
        """Whether work can go on without the item. A device that has failed is no item's fault, and ranks that share a
        model would wait for each other if one of them went on."""
        return (
            self.parallel_config.tensor_parallel_size == 1
            and not isinstance(error, StepProtocolError)
            and not isinstance(error, getattr(torch, "AcceleratorError", ()))
        )

    def _log_items_of_failed_encoder(self, scheduler_output: Any, error: Exception) -> None:
        """The engine ends, and what vLLM logs of it does not say what was encoded."""
        features = [
            self.requests[request_id].mm_features[input_id]
            for request_id, input_ids in scheduler_output.scheduled_encoder_inputs.items()
            for input_id in input_ids
        ]
        items = [f"{feature.identifier} ({feature.modality})" for feature in features]
        logger.error(
            "Encoder cache: the encoder raised %s: %s. The engine cannot go on without its output for %s%s.",
            type(error).__name__,
            error,
            ", ".join(items),
            ", because its ranks share the model" if self.parallel_config.tensor_parallel_size > 1 else "",
        )

    def _plan_reads(self, windows: Sequence[ReadWindow], num_step_tokens: int) -> ReadPlan:
        """A plan of what can be read; a request for which something cannot is left out, and reported."""
        left_out: list[ReadWindow] = []
        while True:
            try:
                plan = self._encoder_runtime.plan_reads(windows, num_step_tokens)
                break
            except RequestError as error:
                own = [window for window in windows if window.request_id == error.request_id]
                windows = [window for window in windows if window.request_id != error.request_id]
                left_out += own
                self._fail_request(error, min(window.step_position for window in own))
        for window in left_out:
            # Placeholder ids that stand there all the same; some models cannot embed theirs as text.
            length = window.num_rows if window.mask is None else len(window.mask)
            plan.is_embed[max(window.step_position, 0) : window.step_position + length] = True
        return plan

    def _fail_request(self, error: RequestError, step_position: int) -> None:
        """`step_position`: the row of the step from which on the request's rows are wrong."""
        first_row = 0
        for request_id in self.input_batch.req_ids:
            if request_id == error.request_id:
                break
            first_row += self._num_scheduled_tokens[request_id]
        first_position = self.requests[error.request_id].num_computed_tokens + step_position - first_row
        rows_lost = isinstance(error, EncoderCacheReadError) and self._report.scheduler_is_behind
        self._report.fail_request(RequestFailure(error.request_id, error.text, first_position, recompute=rows_lost))
        if not rows_lost:
            self._report.fail_item(error.key)

    def _with_report(self, output: Any) -> Any:
        """`output` of a step, with what went wrong in it attached. None stands for a step that is not over yet."""
        report = self._report.take() if output is not None else None
        if report is None:
            return output
        if output is EMPTY_MODEL_RUNNER_OUTPUT:  # one object for all
            output = copy(output)
        # An asynchronous output holds the real one, which is filled in later.
        attach_report(getattr(output, "_model_runner_output", output), report)
        return output

    def _read_windows(self, scheduler_output: Any) -> list[ReadWindow]:
        """What each scheduled request reads in this step, in the order of the batch."""
        windows: list[ReadWindow] = []
        row = 0
        num_scheduled = self._num_scheduled_tokens = scheduler_output.num_scheduled_tokens
        for request_id in self.input_batch.req_ids:
            length = num_scheduled[request_id]
            request = self.requests[request_id]
            begin = request.num_computed_tokens
            end = begin + length
            features = request.mm_features
            low, high = get_mm_features_in_window(features, start=begin, end=end) if features else (0, 0)
            for feature in features[low:high]:
                position = feature.mm_position
                offset = position.offset
                first = max(begin - offset, 0)
                last = min(end - offset, position.length)
                first_row, last_row = position.get_embeds_indices_in_range(first, last)
                if first_row == last_row:
                    continue
                mask = position.is_embed
                windows.append(
                    ReadWindow(
                        request_id,
                        feature.identifier,
                        position.get_num_embeds(),
                        first_row,
                        last_row - first_row,
                        row + offset + first - begin,
                        None if mask is None else mask[first:last].numpy(),
                    )
                )
            row += length
        return windows

    @torch.inference_mode()
    def _measure_encoder_width(self) -> int:
        """Elements in a row of every encoder's output, from running each on the smallest input of its modality.

        Raises `ConfigurationError` for a modality that is not known here, or if widths differ.
        """
        allowed = sorted(self.mm_budget.mm_max_toks_per_item)
        if not allowed or any(modality not in _PROBES for modality in allowed):
            raise ConfigurationError(
                f"the encoder cache serves {', '.join(_PROBES)} items, and this engine allows "
                f"{', '.join(allowed) or 'none'}. Set the others to 0 in limit_mm_per_prompt, or remove the "
                "vllm_neuron_cache key."
            )
        widths = {modality: self._encode_probe(modality).shape[-1] for modality in allowed}
        if len(set(widths.values())) > 1:
            found = ", ".join(f"{width} for {modality}" for modality, width in widths.items())
            raise ConfigurationError(
                f"the encoders return rows of different widths ({found}), and the encoder cache has one for all. Allow "
                "modalities of one width only, with 0 for the others in limit_mm_per_prompt, or remove the "
                "vllm_neuron_cache key."
            )
        return widths[allowed[0]]

    def _encode_probe(self, modality: str) -> torch.Tensor:
        limits = self.model_config.multimodal_config.limit_per_prompt
        configured = limits.get(modality)
        limits[modality] = _PROBES[modality]
        try:
            probe = self._get_mm_dummy_batch(modality, 1)
        finally:
            if configured is None:
                del limits[modality]
            else:
                limits[modality] = configured
        return self.model.embed_multimodal(**probe)[0]

    def _require_known_merge(self, fat_dim: int) -> int:
        """The number of deepstack levels. Raises `ConfigurationError` for a model or rows whose merge is not known."""
        model = self.model
        width = self.inputs_embeds_size
        num_levels = len(getattr(model, "deepstack_input_embeds", ()))
        self._has_deepstack = num_levels > 0
        if type(model).embed_input_ids not in _KNOWN_MERGES:
            raise ConfigurationError(
                f"{type(model).__name__} merges embeddings in a way of its own, which the encoder cache does not know. "
                "Remove the vllm_neuron_cache key to serve it with vLLM's own cache."
            )
        if fat_dim != width * (1 + num_levels):
            raise ConfigurationError(
                f"{type(model).__name__}'s encoder returns rows of {fat_dim}, and the language model takes "
                f"{1 + num_levels} levels of {width}, {width * (1 + num_levels)} in all. Remove the vllm_neuron_cache "
                "key to serve it with vLLM's own cache."
            )
        return num_levels

    def _merge_in_forward(self) -> None:
        """Has the model merge in its forward. vLLM's buffer for embeddings goes: it copies rows of width 0."""
        merge_in_forward(self.model, self.vllm_config, self._encoder_runtime.blocks.buffer)
        self.inputs_embeds.gpu = self.inputs_embeds.cpu = torch.zeros(
            self.max_num_tokens, 0, dtype=self.dtype, device=self.device
        )

    def _take_over_merge_targets(self, num_levels: int) -> MergeTargets:
        """Replaces vLLM's and the model's input buffers by views of tensors with one row more, the dummy row."""
        width = self.inputs_embeds_size

        def target() -> torch.Tensor:
            return torch.zeros(self.max_num_tokens + 1, width, dtype=self.dtype, device=self.device)

        hidden = target()
        self.inputs_embeds.gpu = hidden[:-1]
        if self.device.type == "cpu":
            self.inputs_embeds.cpu = self.inputs_embeds.gpu
        deepstack = tuple(target() for _ in range(num_levels))
        if self._has_deepstack:
            self.model.deepstack_input_embeds = [level[:-1] for level in deepstack]
        return MergeTargets(hidden, deepstack)


class _ProfilingOutputs(dict[str, torch.Tensor]):
    """Stands where vLLM's runner keeps its dict of outputs. vLLM's memory profiling puts outputs of the largest items
    here and clears it; nothing else does. Their width is compared with what was measured."""

    def __init__(self, fat_dim: int) -> None:
        super().__init__()
        self._fat_dim = fat_dim

    def __setitem__(self, key: str, output: torch.Tensor) -> None:
        if output.shape[-1] != self._fat_dim:
            raise EncoderOutputError(
                f"the output for {key} has rows of {output.shape[-1]}, and the smallest input gave {self._fat_dim}"
            )
        super().__setitem__(key, output)

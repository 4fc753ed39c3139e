"""The checks without an engine: a worker's own runtime writes, merges and evicts on the device."""

import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from vllm_neuron_cache.acceptance.report import Check
from vllm_neuron_cache.encoder_cache.item import dense_layout, num_dense_blocks
from vllm_neuron_cache.encoder_cache.pool import EncoderBlockPool
from vllm_neuron_cache.encoder_cache.read_plan import ReadWindow
from vllm_neuron_cache.encoder_cache.steps import StepJournal
from vllm_neuron_cache.errors import AcceptanceError, GraphRecompiledError
from vllm_neuron_cache.graphs.deployment import Deployment
from vllm_neuron_cache.graphs.lanes import Lane
from vllm_neuron_cache.host_traffic import HostTraffic, WatchedLane
from vllm_neuron_cache.runtime import EncoderCacheRuntime, MergeTargets
from vllm_neuron_cache.warmup import make_runtime

NUM_IMAGES, IMAGE_TOKENS = 30, 256
"""The published workload: 30 images of 512 x 512 pixels."""

MERGE_LIMIT_MS = 2.0
"""For their merge, from its call to the end of it on the device: median."""


@torch.inference_mode()
def check_device(
    deployment: Deployment, lane: Lane, device: torch.device, *, rounds: int = 20, limit_ms: float = MERGE_LIMIT_MS
) -> list[Check]:
    """Every check but that of tokens, on the deployment's own runtime. Seals the lane.

    `rounds`: timed merges; those of a CPU are on one thread, as in `bench graphs`. Raises `AcceptanceError` as
    `require_room` does.
    """
    require_room(deployment)
    watched = WatchedLane(lane)
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        return _Run(make_runtime(deployment, watched, device), watched, deployment, device).checks(rounds, limit_ms)
    finally:
        torch.set_num_threads(threads)


def require_room(deployment: Deployment) -> None:
    """Raises `AcceptanceError` if the published workload does not fit a step or the cache, or its merge is no graph of
    its own."""
    tokens = NUM_IMAGES * IMAGE_TOKENS
    geometry = deployment.geometry
    blocks = NUM_IMAGES * num_dense_blocks(IMAGE_TOKENS, geometry.block_size)
    if deployment.merges_in_prefill:
        raise AcceptanceError("compiled_prefill merges inside the model; set it to false to measure the merge.")
    if deployment.max_step_tokens < tokens:
        raise AcceptanceError(
            f"{NUM_IMAGES} images of {IMAGE_TOKENS} rows need a step of {tokens} tokens, and max-num-batched-tokens is "
            f"{deployment.max_step_tokens}. Raise it to {tokens} at least."
        )
    if geometry.num_item_blocks < blocks:
        raise AcceptanceError(
            f"{NUM_IMAGES} images of {IMAGE_TOKENS} rows need {blocks} blocks of {geometry.block_size} rows, and the "
            f"cache has {geometry.num_item_blocks}. Raise encoder_cache_num_blocks to {blocks + 1} at least."
        )


class _Run:
    """A worker's steps: images are written, read back in steps of every kind, evicted, and written again."""

    def __init__(
        self, runtime: EncoderCacheRuntime, lane: WatchedLane, deployment: Deployment, device: torch.device
    ) -> None:
        assert isinstance(runtime.targets, MergeTargets)
        self._runtime = runtime
        self._lane = lane
        self._deployment = deployment
        self._device = device
        self._targets = runtime.targets
        self._pool, self._journal = EncoderBlockPool(deployment.geometry.num_item_blocks), StepJournal()
        self._rows: dict[str, torch.Tensor] = {}
        """What was written, on the host."""
        self._generator = torch.Generator().manual_seed(1)
        self._choose = random.Random(1)

    def checks(self, rounds: int, limit_ms: float) -> list[Check]:
        runtime, lane = self._runtime, self._lane
        runtime.warm_up()
        compiled = lane.num_compiled
        before = self._addresses()
        owned = self._owned()
        write, read = HostTraffic(self._device, owned), HostTraffic(self._device, owned)
        times: list[float] = []
        wrong: list[str] = []
        refused = ""
        try:
            images = self._write("first", write)
            wrong += self._merge_and_compare(images, read)
            for count in (1, 3, 10, NUM_IMAGES):
                wrong += self._merge_and_compare(self._choose.sample(images, count), read)
            times = [self._timed_merge(images) for _ in range(3 + rounds)][3:]
            wrong += self._merge_and_compare(self._write("second", write), read)
        except GraphRecompiledError as error:
            refused = str(error)
        moved = [name for name, address in self._addresses().items() if address != before[name]]
        compilations = lane.num_compiled - compiled
        return [
            _merge_time(times, limit_ms),
            _no_embedding_to_host(write, read),
            Check("stable_pointers", not moved, _moved(moved, before), {"moved": moved, "looked_at": list(before)}),
            _nothing_compiled(compiled, compilations, lane.num_recompiles_refused, refused),
            _rows_exact(wrong, refused),
        ]

    def _owned(self) -> list[torch.Tensor]:
        blocks, targets = self._runtime.blocks, self._targets
        return [blocks.buffer, blocks.mm_hash_tags, blocks.generations, targets.hidden, *targets.deepstack]

    def _addresses(self) -> dict[str, int]:
        names = ("buffer", "mm_hash_tags", "generations", "hidden")
        names += tuple(f"deepstack[{level}]" for level in range(len(self._targets.deepstack)))
        return {name: tensor.data_ptr() for name, tensor in zip(names, self._owned(), strict=True)}

    def _write(self, name: str, traffic: HostTraffic) -> list[str]:
        """Keys of 30 new images, written; older ones make room."""
        pool, journal, runtime = self._pool, self._journal, self._runtime
        keys = [f"{name} {number}" for number in range(NUM_IMAGES)]
        layout = dense_layout(IMAGE_TOKENS, self._deployment.geometry.block_size)
        for key in keys:
            for evicted in pool.make_room(layout.num_blocks):
                journal.record_eviction(evicted)
            journal.record_allocation(pool.reserve(key, layout, reference="request", step=journal.open_seq))
        step = journal.close_step()
        outputs = {key: self._output(key) for key in keys}
        with self._watched(traffic):
            runtime.apply(step)
            for key, output in outputs.items():
                runtime.write(key, output)
        journal.acknowledge(step.seq)
        pool.acknowledge(step.seq)
        for key in keys:
            pool.release(key, "request")
        return keys

    def _output(self, key: str) -> torch.Tensor:
        """What an encoder would leave on the device."""
        buffer = self._deployment.buffer
        self._rows[key] = torch.randn(IMAGE_TOKENS, buffer.fat_dim, generator=self._generator).to(buffer.dtype)
        return self._rows[key].to(self._device)

    def _windows(self, keys: Sequence[str]) -> list[ReadWindow]:
        """The images in some order, with text between them."""
        order = self._choose.sample(list(keys), len(keys))
        spare = self._deployment.max_step_tokens - len(order) * IMAGE_TOKENS
        position = 0
        windows = []
        for key in order:
            gap = self._choose.randint(0, min(spare, 40))
            spare -= gap
            windows.append(ReadWindow("request", key, IMAGE_TOKENS, 0, IMAGE_TOKENS, position + gap, None))
            position += gap + IMAGE_TOKENS
        return windows

    def _merge_and_compare(self, keys: Sequence[str], traffic: HostTraffic) -> list[str]:
        """Names of the targets that are not, to the bit, text with the images' rows in their places."""
        windows = self._windows(keys)
        tokens = self._deployment.max_step_tokens
        targets = (self._targets.hidden, *self._targets.deepstack)
        width = targets[0].shape[1]
        expected = [
            torch.randn(tokens, width, generator=self._generator).to(self._deployment.buffer.dtype) for _ in targets
        ]
        for target, text in zip(targets, expected, strict=True):
            target[:tokens].copy_(text)
        with self._watched(traffic):
            self._runtime.merge(self._runtime.plan_reads(windows, tokens))
        for window in windows:
            place = slice(window.step_position, window.step_position + IMAGE_TOKENS)
            for level, text in enumerate(expected):
                text[place] = self._rows[window.key][:, level * width : (level + 1) * width]
        names = [name for name in self._addresses() if name == "hidden" or name.startswith("deepstack")]
        return [
            f"{name}, {len(keys)} images"
            for name, target, rows in zip(names, targets, expected, strict=True)
            if not torch.equal(_bits(target[:tokens].cpu()), _bits(rows))
        ]

    def _timed_merge(self, keys: Sequence[str]) -> float:
        """Milliseconds of one merge, the device idle before and after."""
        plan = self._runtime.plan_reads(self._windows(keys), self._deployment.max_step_tokens)
        self._wait()
        began = time.perf_counter()
        self._runtime.merge(plan)
        self._wait()
        return (time.perf_counter() - began) * 1e3

    def _wait(self) -> None:
        """Until the device has done what it was told. `torch.neuron.synchronize` where there is one; else a read of
        what the merge writes, whose time then counts as the merge's."""
        if self._device.type == "cpu":
            return
        synchronize = getattr(getattr(torch, self._device.type, None), "synchronize", None)
        if synchronize is not None:
            synchronize()
        else:
            self._targets.hidden[-1, :1].cpu()

    def _watched(self, traffic: HostTraffic) -> Any:
        return _Watch(self._lane, traffic)


class _Watch:
    """Enters a traffic's mode and has the lane tell it of launches."""

    def __init__(self, lane: WatchedLane, traffic: HostTraffic) -> None:
        self._lane, self._traffic = lane, traffic

    def __enter__(self) -> None:
        self._lane.traffic = self._traffic
        self._traffic.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._traffic.__exit__(*error)
        self._lane.traffic = None


def _merge_time(times: list[float], limit_ms: float) -> Check:
    if not times:
        return Check("merge_time", False, "not measured: the run ended before", {"limit_ms": limit_ms})
    values = {
        "median_ms": statistics.median(times),
        "least_ms": min(times),
        "most_ms": max(times),
        "rounds": len(times),
        "limit_ms": limit_ms,
    }
    text = (
        f"{NUM_IMAGES} images of {IMAGE_TOKENS} rows merged in {values['median_ms']:.3f} ms (median of {len(times)}, "
        f"{values['least_ms']:.3f} to {values['most_ms']:.3f}); at most {limit_ms:g} ms"
    )
    return Check("merge_time", values["median_ms"] <= limit_ms, text, values)


def _no_embedding_to_host(write: HostTraffic, read: HostTraffic) -> Check:
    values = {
        "embedding_bytes_in_writes": write.embedding_bytes_to_host,
        "bytes_in_reads": read.bytes_to_host,
        "flag_bytes_in_writes": write.bytes_to_host - write.embedding_bytes_to_host,
        "operators": sorted({f"{transfer.operator} {transfer.dtype}" for transfer in read.to_host})
        + sorted({f"{transfer.operator} {transfer.dtype}" for transfer in write.to_host if transfer.is_embedding}),
        "launches": len(write.launches) + len(read.launches),
    }
    passed = not values["embedding_bytes_in_writes"] and not values["bytes_in_reads"] and bool(read.launches)
    text = (
        f"to the host: {values['bytes_in_reads']} bytes in steps that read, of which 0 are allowed; "
        f"{values['embedding_bytes_in_writes']} bytes of embeddings, of which 0 are allowed, and "
        f"{values['flag_bytes_in_writes']} of flags in steps that write"
    )
    if values["operators"]:
        text += f". By {', '.join(values['operators'])}"
    return Check("no_embedding_to_host", passed, text, values)


def _moved(moved: list[str], looked_at: dict[str, int]) -> str:
    if moved:
        return f"at another address than after warm-up: {', '.join(moved)}"
    return f"{', '.join(looked_at)} are where they were after warm-up"


def _nothing_compiled(warm_up: int, after: int, refused: int, message: str) -> Check:
    text = f"{warm_up} graphs compiled in warm-up, {after} after it, {refused} more were asked for and refused"
    if message:
        text += f": {message}"
    values = {"in_warm_up": warm_up, "after_warm_up": after, "refused": refused}
    return Check("nothing_compiled_after_warm_up", after == 0 and refused == 0, text, values)


def _rows_exact(wrong: list[str], refused: str) -> Check:
    if refused and not wrong:
        return Check("rows_exact", False, "not looked at to the end: a graph was refused", {"wrong": []})
    text = f"not the rows that were written: {'; '.join(wrong)}" if wrong else "every row as it was written, to the bit"
    return Check("rows_exact", not wrong, text, {"wrong": wrong})


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)

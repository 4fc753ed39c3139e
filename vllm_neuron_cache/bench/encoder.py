"""The static vision encoder beside vLLM's own, on the same weights."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vllm_neuron_cache.bench.race import race
from vllm_neuron_cache.encoder_cache.blocks import EncoderCacheBlocks
from vllm_neuron_cache.encoder_cache.item import dense_layout
from vllm_neuron_cache.encoder_cache.packing import pack, padding_ratio
from vllm_neuron_cache.encoder_cache.pool import EncoderBlockPool
from vllm_neuron_cache.encoder_cache.sizing import CacheGeometry
from vllm_neuron_cache.encoder_cache.steps import StepJournal
from vllm_neuron_cache.encoders.qwen3_vl import Qwen3VLEncoder
from vllm_neuron_cache.encoders.static_encoder import StaticEncoder
from vllm_neuron_cache.encoders.weights import ModelWeights
from vllm_neuron_cache.graphs.bucketed import BucketedGraph
from vllm_neuron_cache.graphs.encoder_write import encoder_write_spec
from vllm_neuron_cache.graphs.lanes import InductorLane
from vllm_neuron_cache.graphs.spec import BufferShape
from vllm_neuron_cache.writer import EncoderCacheWriter

Grid = tuple[int, int, int]
"""Temporal frames, height and width of an item, in patches."""


class EncoderBenchShape(NamedTuple):
    """Layers and rows as wide as those of Qwen3-VL 8B, and two layers of 27: each costs the same, so that the write
    weighs more here than there."""

    hidden_size: int = 1152
    num_heads: int = 16
    intermediate_size: int = 4304
    depth: int = 2
    out_hidden_size: int = 4096
    attention_block: int = 512
    cache_block_size: int = 64
    full: tuple[Grid, ...] = ((1, 16, 32),) * 4
    """Fills the largest bucket without padding."""
    mixed: tuple[Grid, ...] = ((1, 16, 32), (1, 16, 20), (1, 16, 16), (1, 22, 20), (1, 20, 20), (4, 16, 16))

    def overrides(self) -> dict[str, Any]:
        """Over the configuration of the small model."""
        sizes = ("hidden_size", "num_heads", "intermediate_size", "depth", "out_hidden_size")
        vision = {name: getattr(self, name) for name in sizes}
        return {
            "vision_config": vision | {"deepstack_visual_indexes": list(range(self.depth))[:3]},
            "text_config": {"hidden_size": self.out_hidden_size},
        }


@torch.inference_mode()
def bench_encoder(
    checkpoint: Path, shape: EncoderBenchShape | None = None, *, rounds: int = 5, step: Callable[[str], None]
) -> dict[str, Any]:
    """Measures and returns the documented JSON: float32, all threads, least wall-clock time of each in turn.

    Stock is one call of the tower. Ours is everything from the items to written and stamped entries.
    """
    from vllm_neuron_cache.integrations.vllm.offline import OfflineEngine

    shape = shape or EncoderBenchShape()
    step("Starting vLLM with a wide encoder")
    engine = OfflineEngine(
        checkpoint,
        cache=None,
        load_format="dummy",
        hf_overrides=shape.overrides(),
        max_model_len=4096,
        max_num_batched_tokens=4096,
        limit_mm_per_prompt={"image": 1, "video": 0},
    )
    bench = _Bench(engine.runner.model, shape)
    step("Compiling the encoder")
    bench.warm_up()
    step("The encoder, a full bucket")
    full = bench.compare("full", shape.full, rounds)
    step("The encoder, a mix of sizes")
    mixed = bench.compare("mixed", shape.mixed, rounds)
    write = bench.write_seconds(shape.full, rounds)
    engine.close()
    return {
        "ratio_stock": full.ours / full.stock,
        "stock_ms": full.stock * 1e3,
        "mixed": {"ratio_stock": mixed.ours / mixed.stock, "padding_ratio": mixed.padding_ratio},
        "write_share": write / full.ours,
        "compiled": bench.lane.num_compiled,
        "recompiles_after_warmup": bench.lane.num_recompiles_refused,
    }


class _Comparison(NamedTuple):
    ours: float
    stock: float
    padding_ratio: float


class _Bench:
    """A tower of vLLM's, and the static encoder with its weights and a cache of its own."""

    def __init__(self, model: Any, shape: EncoderBenchShape) -> None:
        self._tower = model.visual
        self._adapter = Qwen3VLEncoder(model.config.vision_config, dtype=torch.float32, tower=self._tower)
        rows = shape.attention_block // self._adapter.positions_per_row
        self._geometry = CacheGeometry(65, shape.cache_block_size, rows)
        self._pool, self._journal = EncoderBlockPool(self._geometry.num_item_blocks), StepJournal()
        self._blocks = EncoderCacheBlocks(
            self._geometry, fat_dim=self._adapter.fat_dim, dtype=torch.float32, device=torch.device("cpu")
        )
        self.lane = InductorLane()
        weights = ModelWeights(self._tower, self._adapter.weight_shapes, torch.float32, call_layers=True)
        writer = EncoderCacheWriter(self._blocks, self.lane)
        self._encoder = StaticEncoder(
            self._adapter, weights, self._blocks, writer, self.lane, attention_block=shape.attention_block
        )
        writer.warm_up()

    def warm_up(self) -> None:
        self._encoder.warm_up()

    def compare(self, name: str, grids: Sequence[Grid], rounds: int) -> _Comparison:
        generator = torch.Generator().manual_seed(0)
        width = self._adapter.inputs[0].width
        pixels = [torch.randn(t * h * w, width, generator=generator) for t, h, w in grids]
        fields = ({"pixel_values": px, "image_grid_thw": torch.tensor(grid)} for px, grid in zip(pixels, grids))
        items = {f"{name} {number}": self._adapter.item("image", data) for number, data in enumerate(fields)}
        for key, item in items.items():
            self._reserve(key, sum(item.segments) // self._adapter.positions_per_row)
        together, thw = torch.cat(pixels), [list(grid) for grid in grids]
        failures = self._encoder.encode(items)
        assert not failures, failures
        best = race(
            {"stock": lambda: self._tower(together, thw), "ours": lambda: self._encoder.encode(items)},
            rounds=rounds,
            warm_up=1,
            clock=time.perf_counter,
        )
        launches = pack([item.segments for item in items.values()], self._encoder.ladder)
        return _Comparison(best["ours"], best["stock"], padding_ratio(launches))

    def write_seconds(self, grids: Sequence[Grid], rounds: int) -> float:
        """The write graph alone, for as many rows."""
        num_rows = sum(t * h * w for t, h, w in grids) // self._adapter.positions_per_row
        buffer = self._blocks.buffer
        spec = encoder_write_spec((num_rows,), BufferShape(*buffer.shape, buffer.dtype))
        places = torch.arange(num_rows, dtype=torch.int32)
        block_size = self._geometry.block_size
        rows = torch.randn(num_rows, self._adapter.fat_dim)
        args = (buffer, rows, places // block_size, places % block_size)
        graph = BucketedGraph(spec, InductorLane())
        graph.warm_up(lambda bucket: args)
        return race({"write": lambda: graph.run(num_rows, *args)}, rounds=rounds, clock=time.perf_counter)["write"]

    def _reserve(self, key: str, num_rows: int) -> None:
        layout = dense_layout(num_rows, self._geometry.block_size)
        item = self._pool.reserve(key, layout, reference="bench", step=self._journal.open_seq)
        self._journal.record_allocation(item)
        self._blocks.table.apply(self._journal.close_step())

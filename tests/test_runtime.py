"""The worker's side without vLLM: scheduler decisions in, rows in the step out, against a dict of tensors."""

import numpy as np
import pytest
import torch

from vllm_neuron_cache.encoder_cache.blocks import EncoderCacheBlocks
from vllm_neuron_cache.encoder_cache.identity import mm_hash_fingerprint
from vllm_neuron_cache.encoder_cache.item import item_layout
from vllm_neuron_cache.encoder_cache.pool import EncoderBlockPool
from vllm_neuron_cache.encoder_cache.read_plan import ReadWindow
from vllm_neuron_cache.encoder_cache.sizing import CacheGeometry
from vllm_neuron_cache.encoder_cache.steps import StepJournal
from vllm_neuron_cache.errors import ConfigurationError, EncoderCacheReadError, EncoderOutputError, IntegrityError
from vllm_neuron_cache.graphs.lanes import make_lane
from vllm_neuron_cache.runtime import EncoderCacheRuntime, MergeTargets
from vllm_neuron_cache.source_rows import SourceRows

GEOMETRY = CacheGeometry(num_blocks=9, block_size=16, encoder_block_size=32)
WIDTH, LEVELS, TOKENS = 8, 2, 256
FAT = WIDTH * (1 + LEVELS)


class Side:
    """A scheduler's pool and journal with one worker's runtime."""

    def __init__(
        self,
        lane: str,
        geometry: CacheGeometry = GEOMETRY,
        dtype: torch.dtype = torch.float32,
        targets: MergeTargets | SourceRows | None = None,
    ):
        targets = targets or MergeTargets(
            torch.zeros(TOKENS + 1, WIDTH, dtype=dtype),
            tuple(torch.zeros(TOKENS + 1, WIDTH, dtype=dtype) for _ in range(LEVELS)),
        )
        self.geometry, self.targets = geometry, targets
        self.pool, self.journal = EncoderBlockPool(geometry.num_item_blocks), StepJournal()
        self.runtime = EncoderCacheRuntime(
            geometry,
            fat_dim=FAT,
            dtype=dtype,
            device=torch.device("cpu"),
            targets=targets,
            lane=make_lane(lane),
        )
        self.runtime.warm_up()

    def reserve(self, key: str, num_tokens: int, frames: tuple[int, ...] = ()) -> None:
        layout = item_layout(
            num_tokens,
            frames,
            encoder_block_size=self.geometry.encoder_block_size,
            block_size=self.geometry.block_size,
            max_blocks=self.geometry.num_item_blocks,
        )
        for item in self.pool.make_room(layout.num_blocks):
            self.journal.record_eviction(item)
        item = self.pool.reserve(key, layout, reference="request", step=self.journal.open_seq)
        self.journal.record_allocation(item)

    def step(self) -> None:
        """Closes the pass, runs it, and lets go of everything."""
        step = self.journal.close_step()
        self.runtime.apply(step)
        self.journal.acknowledge(step.seq)
        self.pool.acknowledge(step.seq)
        for item in self.pool.items():
            self.pool.release(item.key, "request")

    def read(self, windows: list[ReadWindow], num_step_tokens: int = TOKENS) -> torch.Tensor:
        """Runs the merge and returns the step's rows, all levels beside each other, live rows only."""
        for target in (self.targets.hidden, *self.targets.deepstack):
            target.zero_()
        self.runtime.merge(self.runtime.plan_reads(windows, num_step_tokens))
        return torch.cat([self.targets.hidden, *self.targets.deepstack], dim=1)[:num_step_tokens]


@pytest.fixture(params=["eager", "inductor"])
def side(request):
    if request.param == "inductor":
        from vllm_neuron_cache.graphs.lanes.inductor import compiler_available

        if not compiler_available():
            pytest.skip("inductor needs a C++ compiler, and there is none")
    with torch.inference_mode():
        yield Side(request.param)


@pytest.fixture
def eager_side():
    with torch.inference_mode():
        yield Side("eager")


def output_of(num_tokens: int, seed: int) -> torch.Tensor:
    return torch.randn(num_tokens, FAT, generator=torch.Generator().manual_seed(seed))


def whole(key: str, num_tokens: int, position: int = 0) -> ReadWindow:
    return ReadWindow("request", key, num_tokens, 0, num_tokens, position, None)


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 63, 64, 65, 127, 128])
def test_rows_come_back_as_written(side, num_tokens):
    output = output_of(num_tokens, num_tokens)
    side.reserve("image", num_tokens)
    side.step()
    side.runtime.write("image", output)
    rows = side.read([whole("image", num_tokens, position=TOKENS - num_tokens)])
    assert torch.equal(rows[TOKENS - num_tokens :], output)
    assert not rows[: TOKENS - num_tokens].any()
    side.runtime.check_integrity()


@pytest.mark.parametrize("num_tokens", [1, 16, 100, TOKENS // 2])
def test_a_model_that_merges_by_itself_gets_the_rows_of_every_token(num_tokens):
    """Twice the same item in a step, up to the longest step; then a step of text."""
    with torch.inference_mode():
        rows = SourceRows(TOKENS, torch.device("cpu"))
        side = Side("eager", targets=rows)
        assert {graph.spec.name for graph in side.runtime.graphs} == {"encoder_write", "encoder_stamp"}
        output = output_of(num_tokens, 3)
        side.reserve("image", num_tokens)
        side.step()
        side.runtime.write("image", output)
        windows = [whole("image", num_tokens), whole("image", num_tokens, position=TOKENS - num_tokens)]
        side.runtime.merge(side.runtime.plan_reads(windows, TOKENS))
        taken = rows.take(TOKENS)
        found = side.runtime.blocks.buffer.view(-1, FAT)[taken.clamp(min=0)]
        assert torch.equal(found[:num_tokens], output) and torch.equal(found[TOKENS - num_tokens :], output)
        assert (taken >= 0).sum() == 2 * num_tokens == side.runtime.stats().rows_read
        assert rows.take(TOKENS) is None


def test_video_lies_in_whole_frames_and_reads_back_dense(side):
    frames = (20, 20, 20)  # one frame in an encoder block of 32, two cache blocks of 16 each
    output = output_of(60, 1)
    side.reserve("video", 60, frames)
    side.step()
    side.runtime.write("video", output)
    assert side.pool.get("video").layout.tokens_per_block == (16, 4, 16, 4, 16, 4)
    assert torch.equal(side.read([whole("video", 60)])[:60], output)


def test_an_item_larger_than_the_largest_write_bucket():
    geometry = CacheGeometry(num_blocks=70, block_size=64, encoder_block_size=64)
    with torch.inference_mode():
        side = Side("eager", geometry)
        output = output_of(4400, 1)
        side.reserve("long video", 4400)
        side.step()
        side.runtime.write("long video", output)
        window = ReadWindow("request", "long video", 4400, 4200, 200, 0, None)
        assert torch.equal(side.read([window])[:200], output[4200:])


def test_output_tensor_that_the_encoder_uses_again(side):
    side.reserve("first", 40)
    side.reserve("second", 40)
    side.step()
    output = output_of(40, 1)
    first = output.clone()
    side.runtime.write("first", output)
    output.copy_(output_of(40, 2))
    side.runtime.write("second", output)
    rows = side.read([whole("first", 40), whole("second", 40, position=40)])
    assert torch.equal(rows[:40], first)
    assert torch.equal(rows[40:80], output)


def test_rows_that_are_views_or_of_another_dtype_are_taken(eager_side):
    eager_side.reserve("strided", 40)
    eager_side.step()
    wide = output_of(40, 1).repeat(1, 2).to(torch.bfloat16)
    eager_side.runtime.write("strided", wide[:, :FAT])
    assert torch.equal(eager_side.read([whole("strided", 40)])[:40], wide[:, :FAT].float())


@pytest.mark.parametrize(
    ("shape", "numbers"), [((39, FAT), r"\[39, 24\].*\[40, 24\]"), ((40, FAT + 1), r"\[40, 25\]"), ((40,), r"\[40\]")]
)
def test_output_of_the_wrong_size_is_refused_and_nothing_becomes_readable(eager_side, shape, numbers):
    eager_side.reserve("image", 40)
    eager_side.step()
    with pytest.raises(EncoderOutputError, match=f"item image.*{numbers}"):
        eager_side.runtime.write("image", torch.zeros(shape))
    with pytest.raises(EncoderOutputError, match=f"item image.*{numbers}") as caught:
        eager_side.read([whole("image", 40)])
    assert (caught.value.request_id, caught.value.key) == ("request", "image")
    eager_side.runtime.check_integrity()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("row", [0, 39])
def test_output_that_is_not_finite_is_refused_and_the_row_is_named(eager_side, value, row):
    eager_side.reserve("image", 40)
    eager_side.step()
    output = output_of(40, 1)
    output[row, -1] = value
    with pytest.raises(EncoderOutputError, match=f"item image: 1 of the 40 rows .* row {row}$"):
        eager_side.runtime.write("image", output)
    assert eager_side.runtime.stats().items_written == 0


def test_rows_whose_sum_alone_overflows_are_written(eager_side):
    eager_side.reserve("image", 40)
    eager_side.step()
    eager_side.runtime.write("image", torch.full_like(output_of(40, 1), 3e38))
    assert eager_side.runtime.stats().items_written == 1


def test_an_item_that_failed_can_be_written_when_it_is_reserved_again(eager_side):
    eager_side.reserve("image", 128)
    eager_side.step()
    eager_side.runtime.fail("image", "item image: the encoder raised")
    with pytest.raises(EncoderOutputError, match="the encoder raised"):
        eager_side.read([whole("image", 128)])
    eager_side.runtime.fail("stranger", "not there: nothing to mark")
    eager_side.reserve("other", 128)  # takes the blocks
    eager_side.step()
    eager_side.reserve("image", 128)
    eager_side.step()
    eager_side.runtime.write("image", output_of(128, 2))
    eager_side.read([whole("image", 128)])


def test_another_key_with_the_same_fingerprint_is_not_taken_for_the_item(eager_side, monkeypatch):
    from vllm_neuron_cache.encoder_cache import blocks
    from vllm_neuron_cache.encoder_cache.identity import Fingerprint

    for module in ("vllm_neuron_cache.encoder_cache.blocks", "vllm_neuron_cache.writer"):
        monkeypatch.setattr(f"{module}.mm_hash_fingerprint", lambda key: Fingerprint(7, 7))
    eager_side.reserve("image", 128)
    eager_side.step()
    eager_side.runtime.write("image", output_of(128, 1))
    first = eager_side.runtime.blocks.table.get("image")
    assert eager_side.runtime.blocks.holds("image", first.generation, first.block_ids)
    assert not eager_side.runtime.blocks.holds("image", first.generation + 1, first.block_ids)
    eager_side.reserve("crafted", 128)  # takes the blocks
    eager_side.step()
    assert not eager_side.runtime.blocks.holds("image", 2, first.block_ids)  # reserved, and nothing written yet
    eager_side.runtime.write("crafted", output_of(128, 2))
    assert not eager_side.runtime.blocks.holds("image", first.generation, first.block_ids)
    assert blocks.mm_hash_fingerprint("image") == blocks.mm_hash_fingerprint("crafted")
    eager_side.runtime.check_integrity()


def test_tags_that_are_not_the_entrys_own_are_found(eager_side):
    eager_side.reserve("image", 40)
    eager_side.step()
    eager_side.runtime.write("image", output_of(40, 1))
    eager_side.runtime.check_integrity()
    eager_side.runtime.blocks.generations[list(eager_side.runtime.blocks.table.get("image").block_ids)] += 1
    with pytest.raises(IntegrityError, match="'image', generation 1, is written in blocks"):
        eager_side.runtime.check_integrity()


def test_output_without_blocks_is_refused(eager_side):
    with pytest.raises(EncoderOutputError, match=r"item stranger.*no blocks"):
        eager_side.runtime.write("stranger", output_of(8, 1))


def test_an_evicted_item_cannot_be_read_and_its_rows_are_the_new_owners(eager_side):
    eager_side.reserve("old", 128)
    eager_side.step()
    eager_side.runtime.write("old", output_of(128, 1))
    eager_side.reserve("new", 128)
    eager_side.step()
    eager_side.runtime.write("new", output_of(128, 2))
    with pytest.raises(EncoderCacheReadError, match=r"item old, 128 rows by its placeholder, has no entry"):
        eager_side.read([whole("old", 128)])
    assert torch.equal(eager_side.read([whole("new", 128)])[:128], output_of(128, 2))


def test_tags_name_the_item_after_the_write_and_nothing_before(eager_side):
    eager_side.reserve("image", 40)
    eager_side.step()
    blocks = eager_side.runtime.blocks
    item = eager_side.pool.get("image")
    assert not blocks.mm_hash_tags[list(item.block_ids)].any()
    eager_side.runtime.write("image", output_of(40, 1))
    for block in item.block_ids:
        assert tuple(blocks.mm_hash_tags[block].tolist()) == mm_hash_fingerprint("image")
        assert blocks.generations[block] == item.generation
    untouched = [block for block in range(GEOMETRY.num_item_blocks) if block not in item.block_ids]
    assert not blocks.mm_hash_tags[untouched].any()


def test_tags_are_empty_while_the_rows_change(eager_side):
    """A rewrite of a tagged block: at the moment of the row write, no tag of it may stand."""
    eager_side.reserve("first", 128)
    eager_side.step()
    eager_side.runtime.write("first", output_of(128, 1))
    eager_side.reserve("second", 128)
    eager_side.step()
    seen = []
    writer, blocks = eager_side.runtime._writer, eager_side.runtime.blocks
    run = writer._write.run

    def spying(bucket, *args):
        seen.append(blocks.mm_hash_tags[: GEOMETRY.num_item_blocks].any().item())
        run(bucket, *args)

    writer._write.run = spying
    eager_side.runtime.write("second", output_of(128, 2))
    assert seen and not any(seen)
    assert blocks.mm_hash_tags[: GEOMETRY.num_item_blocks].any()


def test_scratch_block_belongs_to_nobody(eager_side):
    for number in range(20):
        eager_side.reserve(f"image {number}", 37)
        eager_side.step()
        eager_side.runtime.write(f"image {number}", output_of(37, number))
        owned = {block for item in eager_side.pool.items() for block in item.block_ids}
        assert GEOMETRY.scratch_block_id not in owned


def test_random_trace_against_a_dict(side):
    """500 steps of items of random sizes, written, evicted, read in windows; every row compared."""
    generator = np.random.default_rng(0)
    sizes = {f"item {n}": int(generator.integers(1, 60)) for n in range(12)}
    stored: dict[str, torch.Tensor] = {}
    for step in range(500):
        key = f"item {generator.integers(12)}"
        written = None
        if side.pool.get(key) is None:
            side.reserve(key, sizes[key])
            written = stored[key] = output_of(sizes[key], step)
        side.step()
        if written is not None:
            side.runtime.write(key, written)
        stored = {name: stored[name] for name in stored if side.pool.get(name) is not None}
        windows, wanted, position = [], torch.zeros(TOKENS, FAT), 0
        for name in generator.permutation(sorted(stored))[: generator.integers(1, 5)].tolist():
            first = int(generator.integers(0, sizes[name]))
            count = int(generator.integers(1, sizes[name] - first + 1))
            position += int(generator.integers(0, 4))
            windows.append(ReadWindow("request", name, sizes[name], first, count, position, None))
            wanted[position : position + count] = stored[name][first : first + count]
            position += count
        assert torch.equal(side.read(windows), wanted)
        side.runtime.check_integrity()
        side.pool.check_integrity()
    assert side.runtime.stats().recompiles_after_warmup == 0


def test_a_buffer_that_cannot_be_allocated_says_how_large_it_would_be():
    geometry = CacheGeometry(num_blocks=1 << 40, block_size=512, encoder_block_size=512)
    with pytest.raises(ConfigurationError, match=r"GiB.*Lower encoder_cache_num_blocks"):
        EncoderCacheBlocks(geometry, fat_dim=FAT, dtype=torch.float32, device=torch.device("cpu"))

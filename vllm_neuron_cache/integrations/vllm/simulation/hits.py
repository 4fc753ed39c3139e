"""How many hits a cache of a size would have, by playing requests."""

from collections.abc import Sequence

from vllm_neuron_cache.encoder_cache.item import num_dense_blocks
from vllm_neuron_cache.encoder_cache.sizing import CacheGeometry
from vllm_neuron_cache.integrations.vllm.simulation.engine import SimulatedEngine, SimulatedEngineConfig, play
from vllm_neuron_cache.planner.values import SimulatedHits
from vllm_neuron_cache.simulation.trace import one_item_requests, repeating_items

NUM_REQUESTS = 2000
_MAX_NUM_SEQS = 16
_KV_BLOCK_SIZE = 128


def simulate_hits(
    geometry: CacheGeometry,
    item_tokens: Sequence[int],
    reuse: float,
    *,
    num_requests: int = NUM_REQUESTS,
    seed: int = 0,
) -> SimulatedHits:
    """Plays `num_requests` requests of one item each, a share `reuse` of them for items seen before.

    Sizes are drawn from `item_tokens`, and repeats as `repeating_items` draws them. A request whose item can never fit
    is refused on arrival, and counts as one that was not found. The same arguments give the same answer.
    """
    items = repeating_items(item_tokens, num_requests, reuse=reuse, seed=seed)
    fitting = [i for i in items if num_dense_blocks(i.num_tokens, geometry.block_size) <= geometry.num_item_blocks]
    if not fitting:
        return SimulatedHits(0.0, 0.0)
    largest = max(item.num_tokens for item in fitting)
    engine = SimulatedEngine(
        SimulatedEngineConfig(
            geometry=geometry,
            largest_item_tokens=largest,
            max_num_batched_tokens=max(largest, 2048),
            max_num_seqs=_MAX_NUM_SEQS,
            kv_block_size=_KV_BLOCK_SIZE,
            num_kv_blocks=_MAX_NUM_SEQS * (largest // _KV_BLOCK_SIZE + 2) + 1,
        )
    )
    play(engine, one_item_requests(fitting, max_tokens=4))
    num_tokens = sum(item.num_tokens for item in items)
    num_encoded_tokens = engine.worker.num_encoded_tokens + num_tokens - sum(item.num_tokens for item in fitting)
    return SimulatedHits(
        hit_rate=engine.manager.stats.hits / len(items),
        encoder_tokens_saved_fraction=1 - num_encoded_tokens / num_tokens,
    )

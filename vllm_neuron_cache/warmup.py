"""Compiles what a deployment needs before it serves: every graph in every bucket, once, with no look at an output."""

import hashlib
from typing import NamedTuple

import torch

from vllm_neuron_cache.encoders.static_encoder import ONE_RANK
from vllm_neuron_cache.encoders.weights import BlankWeights, plain_form
from vllm_neuron_cache.errors import ConfigurationError
from vllm_neuron_cache.graphs.aliases import mutated_names
from vllm_neuron_cache.graphs.deployment import Deployment
from vllm_neuron_cache.graphs.lanes import Lane
from vllm_neuron_cache.graphs.merge import example_targets
from vllm_neuron_cache.graphs.spec import GraphSpec, flat_names, flatten
from vllm_neuron_cache.graphs.tracing import trace_graph
from vllm_neuron_cache.runtime import EncoderCacheRuntime, MergeTargets
from vllm_neuron_cache.source_rows import SourceRows


class ManifestEntry(NamedTuple):
    """One graph in one bucket."""

    graph: str
    bucket: int
    sha256: str
    """Of the traced graph with the shapes, dtypes and aliases of its arguments: the same for the same compilation,
    whatever the data, the process or the lane."""
    argument_bytes: int


class WarmUpResult(NamedTuple):
    graphs_lowered: int
    graphs_from_cache: int
    """Those that a compiler's cache on disk had from an earlier start."""


def manifest(deployment: Deployment) -> list[ManifestEntry]:
    """What `warm_up` would compile, in its order. Needs neither memory nor device."""
    return [_entry(spec, bucket) for spec in deployment.specs for bucket in spec.buckets]


@torch.inference_mode()
def warm_up(deployment: Deployment, lane: Lane, device: torch.device) -> WarmUpResult:
    """Allocates the cache on `device` as a worker does and lowers every bucket in `lane`. Seals the lane.

    Outputs are not read, so that a compiler which only collects graphs and returns zeros (`neuron_parallel_compile`)
    collects them all. Raises `ConfigurationError` as `make_runtime` does.
    """
    make_runtime(deployment, lane, device).warm_up()
    return WarmUpResult(sum(len(spec.buckets) for spec in deployment.specs), lane.num_from_cache)


def make_runtime(deployment: Deployment, lane: Lane, device: torch.device) -> EncoderCacheRuntime:
    """A worker's side of the cache with nothing compiled yet, encoders without their weights. Allocates its memory.

    Raises `ConfigurationError` if the cache does not fit, or the lane is for another kernel.
    """
    if lane.kernel != deployment.kernel:
        raise ConfigurationError(
            f"the deployment moves rows by kernel '{deployment.kernel}', and the lane was made for '{lane.kernel}': "
            "other graphs would be compiled than its manifest names. Make both of one configuration."
        )
    buffer = deployment.buffer
    with device:
        targets = (
            SourceRows(deployment.max_step_tokens, device)
            if deployment.merges_in_prefill
            else MergeTargets(*example_targets(buffer, deployment.num_levels, deployment.max_step_tokens))
        )
    runtime = EncoderCacheRuntime(
        deployment.geometry, fat_dim=buffer.fat_dim, dtype=buffer.dtype, device=device, targets=targets, lane=lane
    )
    for adapter in deployment.encoders:
        weights = BlankWeights(plain_form(adapter.weight_shapes, adapter.dtype), device)
        runtime.add_encoder(adapter, weights, attention_block=deployment.attention_block, ranks=ONE_RANK)
    return runtime


def _entry(spec: GraphSpec, bucket: int) -> ManifestEntry:
    args = spec.meta_args(bucket)
    graph = trace_graph(spec.name, spec.fn, args)
    names, tensors = flat_names(spec.fn, args), list(flatten(args))
    signature = [(name, str(tensor.dtype), tuple(tensor.shape)) for name, tensor in zip(names, tensors, strict=True)]
    described = repr((graph.code, signature, mutated_names(graph.graph, names)))
    sha256 = hashlib.sha256(described.encode()).hexdigest()
    return ManifestEntry(spec.name, bucket, sha256, sum(tensor.nbytes for tensor in tensors))

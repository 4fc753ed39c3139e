"""From a function to the graph that an ahead-of-time compiler gets."""

import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch._functorch.aot_autograd import aot_function
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorDeviceMismatchError,
)

from vllm_neuron_cache.errors import GraphRuleError, GraphViolation
from vllm_neuron_cache.graphs.spec import flatten, unflatten


class _GraphTaken(Exception):
    """Ends AOTAutograd when it hands over its graph: nothing is to be run."""


def trace_graph(name: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> torch.fx.GraphModule:
    """AOTAutograd's forward graph of `fn`, one placeholder for each of `flatten(args)`, in that order.

    Operators in it are functional; a mutated argument ends in a `copy_` onto its placeholder. `args` give shapes,
    dtypes and devices and are not touched; on the meta device, which then stands for the accelerator, even a copy
    to the host that the CPU would not notice is in the graph.

    Raises `GraphRuleError` where tracing itself needs a value or a shape that only running would give, meets a tensor
    that is not an argument, or does not keep the arguments apart.
    """
    taken: list[torch.fx.GraphModule] = []

    def take(graph: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Any:
        taken.append(graph)
        raise _GraphTaken

    def flat_fn(*tensors: torch.Tensor) -> Any:
        before = [_layout(tensor) for tensor in tensors]
        outputs = fn(*unflatten(tensors, args))
        for number, (tensor, layout) in enumerate(zip(tensors, before)):
            if _layout(tensor) != layout:
                raise _refused(name, "whole_buffer_rewrite", f"tensor {number}", "is given another shape or layout")
        return outputs

    # A graph from AOTAutograd's cache would not come through `take`.
    with torch.no_grad(), torch._functorch.config.patch(enable_autograd_cache=False):
        try:
            aot_function(flat_fn, fw_compiler=take, keep_inference_input_mutations=True)(*flatten(args))
        except _GraphTaken:
            pass
        except DataDependentOutputException as error:
            raise _refused(name, "host_transfer", error.func, "reads a value on the host") from error
        except DynamicOutputShapeException as error:
            # A mask between brackets arrives here as the nonzero that makes indices of it.
            frames = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
            rule = "boolean_index" if "meta_index_Tensor" in frames or "masked" in str(error.func) else "data_dependent"
            raise _refused(name, rule, error.func, "makes a shape that depends on data") from error
        except FakeTensorDeviceMismatchError as error:
            raise _refused(name, "host_transfer", "a tensor made in the graph", str(error)) from error
        except AssertionError as error:
            if "convert all Tensors to FakeTensors" not in str(error):
                raise
            what = "is used in the graph; make it an argument"
            raise _refused(name, "host_transfer", "a tensor from outside", what) from error
    (graph,) = taken
    count = sum(node.op == "placeholder" for node in graph.graph.nodes)
    if count != len(list(flatten(args))):
        what = f"are {count} in the graph: those that share memory become one, and an operator with effects adds one"
        raise _refused(name, "alias_map", f"{len(list(flatten(args)))} arguments", what)
    return graph


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


def _refused(name: str, rule: str, operator: Any, what: str) -> GraphRuleError:
    return GraphRuleError(name, [GraphViolation(rule, str(operator), what)])

"""Weights of a model that is loaded already, as arguments of a graph."""

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from vllm_neuron_cache.errors import ConfigurationError
from vllm_neuron_cache.graphs.layers import rms_norm

Shapes = Mapping[str, tuple[int, ...]]
"""Shape of each weight, by its path in the module. A linear layer's weight is `[out_features, in_features]`."""


class WeightInfo(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class BoundWeights:
    """Weights by name, and the layers that use them. Changes nothing."""

    def __init__(self, weights: Mapping[str, torch.Tensor], out_features: Mapping[str, int]) -> None:
        self._weights = weights
        self._out_features = out_features

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._weights[name]

    def linear(self, x: torch.Tensor, layer: str) -> torch.Tensor:
        """`x` `[..., in_features]` through the linear layer of that path; `[..., out_features]`."""
        if layer in self._out_features:
            return torch.ops.vllm_neuron_cache.layer(x, self._weights[_handle(layer)], self._out_features[layer])
        return F.linear(x, self._weights[f"{layer}.weight"], self._weights.get(f"{layer}.bias"))

    def layer_norm(self, x: torch.Tensor, layer: str, eps: float) -> torch.Tensor:
        """`x` normalised over its last dimension."""
        return F.layer_norm(x, x.shape[-1:], self._weights[f"{layer}.weight"], self._weights[f"{layer}.bias"], eps)

    def rms_norm(self, x: torch.Tensor, layer: str, eps: float) -> torch.Tensor:
        """`x` over its root mean square in float32, over its last dimension; of the dtype of `x`."""
        return rms_norm(x, self._weights[f"{layer}.weight"], eps)


class WeightForm(NamedTuple):
    """Which tensors a graph takes for its weights.

    A linear layer is its weight and bias, or, where the serving engine has packed these into a form of its own, the
    layer as a whole: an opaque operator that calls it, with a handle instead of weights.
    """

    weights: tuple[WeightInfo, ...]
    out_features: Mapping[str, int]
    """Of each layer that is called as a whole."""

    def example(self) -> tuple[torch.Tensor, ...]:
        """Zeros, on torch's default device."""
        return tuple(torch.zeros(info.shape, dtype=info.dtype) for info in self.weights)

    def bind(self, tensors: Sequence[torch.Tensor]) -> BoundWeights:
        names = (info.name for info in self.weights)
        return BoundWeights(dict(zip(names, tensors, strict=True)), self.out_features)

    @property
    def num_bytes(self) -> int:
        return sum(info.dtype.itemsize * torch.Size(info.shape).numel() for info in self.weights)


def plain_form(shapes: Shapes, dtype: torch.dtype) -> WeightForm:
    """Every weight as a tensor: what is exported, and what a device gets."""
    return WeightForm(tuple(WeightInfo(name, shape, dtype) for name, shape in shapes.items()), {})


class EncoderWeights(Protocol):
    """Where a graph's weights come from."""

    form: WeightForm

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """In the order of `form`."""

    def forget(self) -> None:
        """They may be others from now on."""


class BlankWeights:
    """Zeros, for compiling without a model."""

    def __init__(self, form: WeightForm, device: torch.device) -> None:
        self.form = form
        with device:
            self.tensors = form.example()

    def forget(self) -> None:
        """There is nothing to read again."""


class ModelWeights:
    """The weights of a loaded module, without a copy of any that the module itself still has."""

    def __init__(self, module: torch.nn.Module, shapes: Shapes, dtype: torch.dtype, *, call_layers: bool) -> None:
        """`call_layers`: linear layers of the serving engine are called as wholes. Otherwise a weight that the engine
        has packed is computed from its layer, which is a second copy of it.

        Raises `ConfigurationError` where the module's weights are not those that the encoder takes.
        """
        self._module = module
        self._shapes = shapes
        called = {path: _submodule(module, path) for path in _linear_paths(module, shapes)} if call_layers else {}
        # The registry below forgets a layer that nobody else holds.
        self._layers = {path: _Layer(layer) for path, layer in called.items()}
        weights = []
        for name, shape in shapes.items():
            path, _, kind = name.rpartition(".")
            if path not in called:
                weights.append(WeightInfo(name, shape, dtype))
            elif kind == "weight":
                weights.append(WeightInfo(_handle(path), (1,), torch.int32))
        self.form = WeightForm(tuple(weights), {path: shapes[f"{path}.weight"][0] for path in called})
        self._tensors: tuple[torch.Tensor, ...] | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """In the order of `form`. Read from the module at first use, and after `forget`."""
        if self._tensors is None:
            self._tensors = tuple(self._read(info) for info in self.form.weights)
        return self._tensors

    def forget(self) -> None:
        """The module has other weights now."""
        self._tensors = None

    def _read(self, info: WeightInfo) -> torch.Tensor:
        path, _, kind = info.name.rpartition(".")
        if kind == "layer":
            return self._layers[path].handle
        layer = _submodule(self._module, path)
        tensor = _weight(layer, kind, self._shapes, path)
        if kind in dict(layer.named_buffers(recurse=False)):
            # Tables stay as they were made, whatever the type of the weights, and are converted where they are used.
            tensor = tensor.to(info.dtype)
        if tuple(tensor.shape) != info.shape or tensor.dtype is not info.dtype:
            raise ConfigurationError(
                f"the model's {info.name} is {list(tensor.shape)} {tensor.dtype}, and the compiled encoder takes "
                f"{list(info.shape)} {info.dtype}. Set vllm_neuron_cache.compiled_encoder to false."
            )
        return tensor


def _linear_paths(module: torch.nn.Module, shapes: Shapes) -> list[str]:
    """Paths of the linear layers that are the serving engine's own: those know how they multiply."""
    paths = [name.removesuffix(".weight") for name in shapes if name.endswith(".weight")]
    return [path for path in paths if hasattr(_submodule(module, path), "quant_method")]


def _submodule(module: torch.nn.Module, path: str) -> torch.nn.Module:
    try:
        return module.get_submodule(path)
    except AttributeError as error:
        raise _missing(path) from error


def _missing(name: str) -> ConfigurationError:
    return ConfigurationError(
        f"the model has no {name}, and the compiled encoder takes it. Set vllm_neuron_cache.compiled_encoder to false."
    )


def _weight(layer: torch.nn.Module, kind: str, shapes: Shapes, path: str) -> torch.Tensor:
    tensor = getattr(layer, kind, None)
    if tensor is None:
        raise _missing(f"{path}.{kind}")
    tensor = tensor.detach()
    shape = shapes[f"{path}.{kind}"]
    if tensor.numel() or not torch.Size(shape).numel():
        # A convolution of whole patches is a linear layer.
        return tensor.flatten(1) if tensor.ndim > len(shape) == 2 else tensor
    # vLLM packs weights for the CPU and leaves an empty tensor. What the layer makes of the unit vectors is the weight.
    bias = layer.bias
    unit = torch.eye(shape[1], dtype=bias.dtype if bias is not None else torch.get_default_dtype())
    return layer.quant_method.apply(layer, unit, bias=None).t().contiguous()


def _handle(layer: str) -> str:
    return f"{layer}.layer"


# Layers as operators -------------------------------------------------------------------------------------------


class _Layer:
    """A layer with the handle by which a graph names it. A handle is data, so that a graph is the same for all."""

    def __init__(self, layer: Callable[[torch.Tensor], Any]) -> None:
        number = next(_numbers)
        self.handle = torch.tensor([number], dtype=torch.int32)
        self._layer = layer
        _layers[number] = self

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        result = self._layer(x)
        # vLLM's layers return the bias beside it, where it is to be added later.
        return result[0] if isinstance(result, tuple) else result


_numbers = itertools.count()
_layers: weakref.WeakValueDictionary[int, _Layer] = weakref.WeakValueDictionary()

_library = torch.library.Library("vllm_neuron_cache", "FRAGMENT")
_library.define("layer(Tensor x, Tensor handle, int out_features) -> Tensor")


def _call_layer(x: torch.Tensor, handle: torch.Tensor, out_features: int) -> torch.Tensor:
    return _layers[int(handle)](x)


def _layer_shape(x: torch.Tensor, handle: torch.Tensor, out_features: int) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


_library.impl("layer", _call_layer, "CPU")
_library.impl("layer", _layer_shape, "Meta")

"""What the layers of encoders have in common."""

from functools import partial

import torch
import torch.nn.functional as F

from vllm_neuron_cache.encoders.weights import Shapes

ACTIVATIONS = {"gelu": F.gelu, "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"), "silu": F.silu}
"""By their names in a model's configuration."""


def linear_shapes(path: str, in_features: int, out_features: int) -> Shapes:
    """Of a linear layer with a bias."""
    return {f"{path}.weight": (out_features, in_features), f"{path}.bias": (out_features,)}


def norm_shapes(path: str, width: int) -> Shapes:
    """Of a layer norm."""
    return {f"{path}.weight": (width,), f"{path}.bias": (width,)}


def clamp_float16(x: torch.Tensor) -> torch.Tensor:
    """Brings float16 back into its range, as the models' own code does where their activations leave it. Other types
    are left as they are."""
    if x.dtype is not torch.float16:
        return x
    largest = torch.finfo(x.dtype).max - 1000
    return x.clamp(-largest, largest)

"""What the Neuron compiler refuses, with where that is written.

A list of what is known to fail, not of everything that works: `neuronx-cc list-operators --framework XLA` on a machine
with the SDK is the authority. Sources are AWS Neuron's pages of compiler error codes unless they say otherwise
(awsdocs-neuron.readthedocs-hosted.com/en/latest/compiler/error-codes/).
"""

import torch

_SORT = "lowers to an HLO sort, NCC_EVRF029: sort is not supported on trn2; torch.topk too, unless it matches TopK"
_SOLVE = "NCC_EVRF001: unsupported operator"

UNSUPPORTED_OPERATORS: dict[str, str] = {
    "aten.sort": _SORT,
    "aten.argsort": _SORT,
    "aten.topk": _SORT,
    "aten.kthvalue": _SORT,
    "aten.median": _SORT,
    "aten.mode": _SORT,
    "aten.searchsorted": _SORT,
    "aten.unique_consecutive": _SORT,
    "aten._unique2": _SORT,
    "aten.triangular_solve": _SOLVE,
    "aten.linalg_solve_triangular": _SOLVE,
}
"""Name of an operator without its overload, and why it does not compile. Where the HLO sort comes from: issue 868 of
github.com/aws-neuron/aws-neuron-sdk."""

UNSUPPORTED_DTYPES: dict[torch.dtype, str] = {
    torch.complex32: "NCC_EVRF004: complex types are not supported",
    torch.complex64: "NCC_EVRF004: complex types are not supported",
    torch.complex128: "NCC_EVRF004: complex types are not supported",
    torch.float64: "not among the device's types (Neuron documentation, page Data Types)",
}

INTEGER_REDUCE = "NCC_EVRF016 and NCC_EVRF060: a scatter that reduces integers is refused"

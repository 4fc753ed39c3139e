"""NKI as the kernels use it (dialect of NKI 0.5 to 0.7), or nothing where it is not installed.

Every call that a kernel makes, with the page that documents it; the pages lie under
https://awsdocs-neuron.readthedocs-hosted.com/en/v2.33.0/ unless another address is given:

- `nki.jit`: nki/api/generated/nki.jit.html in v2.33.1. A kernel returns the tensor that it mutates: a kernel without an
  output reports no alias, and its write would be dropped.
- `nl.ndarray(shape, dtype=, buffer=)`: nki/api/generated/nki.language.ndarray.html
- `nl.sbuf`: /en/latest/nki/api/generated/nki.language.sbuf.html; `nl.int32`: /en/latest/nki/api/nki.language.html
- `tensor.reshape`, `tensor.ap(pattern=, offset=, vector_offset=, indirect_dim=)`, `.shape`, `.dtype`:
  nki/api/generated/nki.language.NkiTensor.html and nki/deep-dives/nki-aps.html in v2.31.0. The meaning of `offset` on a
  view changed between releases; the kernels call `ap` on whole tensors, where both meanings agree.
- `tensor[a:b, c:d]`: nki/get-started/about/indexing-overview.html in v2.29.1
- `nisa.dma_copy(dst=, src=, oob_mode=)`, gather and scatter by `vector_offset`: an SBUF tensor `[P, 1]`, and the tensor
  that it indexes in HBM: /general/nki/api/generated/nki.isa.dma_copy.html
- `nisa.oob_mode.skip`: nki/api/generated/nki.isa.oob_mode.html in v2.29.1
- Python's `for` over `range`, unrolled when the kernel is specialised: /en/latest/nki/deep-dives/nki-loops.html
- `nki.simulate`, in tests: nki/api/generated/nki.simulate.html in v2.32.0
"""

from collections.abc import Callable
from typing import Any

from vllm_neuron_cache.errors import ConfigurationError

__all__ = ["jit", "missing", "nisa", "nl", "require_nki"]

missing = ""
"""Why NKI cannot be used here; empty where it can."""

try:
    import nki
    import nki.isa as nisa
    import nki.language as nl

    _jit: Callable[..., Any] | None = nki.jit
except (ImportError, AttributeError) as error:  # The project of this name on PyPI is a placeholder without `jit`.
    missing = str(error)
    nisa = nl = _jit = None


def jit(kernel: Callable[..., Any]) -> Any:
    """`nki.jit`; without NKI the function itself, which nothing but a stand-in can run."""
    return kernel if _jit is None else _jit(kernel)


def require_nki() -> None:
    """Raises `ConfigurationError` where NKI cannot be used."""
    if missing:
        raise ConfigurationError(
            f'kernel "nki" needs the Neuron SDK\'s package nki, which cannot be imported ({missing}): install it from '
            'AWS\'s package index (PyPI has only a placeholder), or choose kernel "compiler"'
        )

"""The handful of NKI calls that the kernels make, in NumPy, and nothing else: what it does not know it refuses.

It is stricter than the device: no conversion between dtypes, equal shapes on both sides of a copy, an index out of
range is an error unless it is the sentinel and the copy skips it, no row is scattered to twice by one copy, and no
element is read before it is written. bfloat16 is held as its bits. It knows no time, no engines, and no capacity beyond
one tile's.
"""

from enum import Enum
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

PARTITIONS = 128
SBUF_PARTITION_BYTES = 192 * 1024
SENTINEL = -1


class StandInError(Exception):
    """The kernel did what the device does not, or what this stand-in does not know."""


class Dtype(NamedTuple):
    name: str
    storage: np.dtype


INT32 = Dtype("int32", np.dtype(np.int32))
DTYPES = {
    torch.int32: INT32,
    torch.bfloat16: Dtype("bfloat16", np.dtype(np.uint16)),
    torch.float16: Dtype("float16", np.dtype(np.uint16)),
    torch.float32: Dtype("float32", np.dtype(np.uint32)),
}
BITS = {2: (torch.int16, np.uint16), 4: (torch.int32, np.uint32)}


class Names:
    """A module that has these names and refuses every other."""

    def __init__(self, module: str, **names: Any) -> None:
        self.__dict__.update(names, _module=module)

    def __getattr__(self, name: str) -> Any:
        raise StandInError(f"{self._module}.{name} is unknown to the stand-in")


class Tensor:
    """A view of flat memory: shape, strides and offset in elements, and at most one index per row."""

    def __init__(self, memory, written, shape, strides, offset, dtype, buffer, rows=None):
        self.memory, self.written, self.shape, self.strides = memory, written, tuple(shape), tuple(strides)
        self.offset, self.dtype, self.buffer, self.rows = offset, dtype, buffer, rows

    def __getattr__(self, name):
        raise StandInError(f"a tensor's {name!r} is unknown to the stand-in")

    def _is_whole(self):
        return self.rows is None and self.offset == 0 and self.memory.size == np.prod(self.shape, dtype=int)

    def __getitem__(self, key):
        if not isinstance(key, tuple) or len(key) != len(self.shape) or self.rows is not None:
            raise StandInError(f"a tensor {self.shape} takes one slice per dimension, not {key!r}")
        offset, shape = self.offset, []
        for part, size, stride in zip(key, self.shape, self.strides):
            known = isinstance(part, slice) and part.step is None
            if not known or not 0 <= part.start < part.stop <= size:
                raise StandInError(f"{part!r} is no slice within 0 to {size}")
            offset += part.start * stride
            shape.append(part.stop - part.start)
        return Tensor(self.memory, self.written, shape, self.strides, offset, self.dtype, self.buffer)

    def reshape(self, shape):
        if self.buffer != "hbm" or not self._is_whole() or np.prod(shape, dtype=int) != self.memory.size:
            raise StandInError(f"reshape of a {self.buffer} tensor {self.shape} to {shape}")
        return Tensor(self.memory, self.written, shape, _strides(shape), 0, self.dtype, self.buffer)

    def ap(self, *, pattern, offset, vector_offset, indirect_dim):
        """For partition `i` row `vector_offset[i]`, of it the columns that `pattern[1]` names from `offset` on."""
        if self.buffer != "hbm" or not self._is_whole() or len(self.shape) != 2:
            raise StandInError(f"ap indexes a whole matrix in HBM, not a {self.buffer} tensor {self.shape}")
        ids = vector_offset
        if not isinstance(ids, Tensor) or ids.buffer != "sbuf" or ids.dtype != INT32 or ids.rows is not None:
            raise StandInError("vector_offset is an int32 tile in SBUF")
        if indirect_dim != 0 or len(pattern) != 2 or pattern[0][0] != self.strides[0] or pattern[1][0] != 1:
            raise StandInError(
                f"pattern {pattern}, indirect_dim {indirect_dim}: only whole rows by dimension 0 are known"
            )
        if ids.shape != (pattern[0][1], 1):
            raise StandInError(f"indices {ids.shape} for {pattern[0][1]} partitions")
        shape = (pattern[0][1], pattern[1][1])
        return Tensor(self.memory, self.written, shape, self.strides, offset, self.dtype, self.buffer, rows=ids)

    def addresses(self, skip):
        """Address of every element, and which rows the copy skips (bool `[rows]`)."""
        grids = np.meshgrid(
            *(np.arange(size) * stride for size, stride in zip(self.shape, self.strides)), indexing="ij"
        )
        skipped = np.zeros(self.shape[0] if self.shape else 1, dtype=bool)
        if self.rows is None:
            return self.offset + sum(grids), skipped
        rows = self.rows.read()[:, 0].astype(np.intp)
        skipped = (rows == SENTINEL) & skip
        limit = self.memory.size // self.strides[0]
        if not np.all(skipped | ((rows >= 0) & (rows < limit))):
            raise StandInError(f"an index is outside 0 to {limit - 1}: {rows.min()} to {rows.max()}")
        return self.offset + rows[:, None] * self.strides[0] + grids[1], skipped

    def read(self):
        addresses, _ = self.addresses(skip=False)
        self._check(addresses)
        return self.memory[addresses]

    def _check(self, addresses, written=True):
        if addresses.size and not 0 <= addresses.min() <= addresses.max() < self.memory.size:
            raise StandInError(f"addresses {addresses.min()} to {addresses.max()} of {self.memory.size} elements")
        if written and not self.written[addresses].all():
            raise StandInError(f"reads {self.buffer} elements that nothing has written")


def _strides(shape):
    return [int(np.prod(shape[place + 1 :], dtype=int)) for place in range(len(shape))]


def ndarray(shape, *, dtype, buffer):
    """A tile in SBUF, with nothing in it."""
    if buffer != "sbuf" or len(shape) != 2 or dtype not in DTYPES.values():
        raise StandInError(f"ndarray({shape}, {dtype}, {buffer}): only matrices in SBUF are known")
    if not 1 <= shape[0] <= PARTITIONS or shape[1] < 1:
        raise StandInError(f"a tile {shape} has 1 to {PARTITIONS} partitions")
    if shape[1] * dtype.storage.itemsize > SBUF_PARTITION_BYTES:
        raise StandInError(f"a tile {shape} of {dtype.name} exceeds {SBUF_PARTITION_BYTES} bytes a partition")
    size = shape[0] * shape[1]
    memory = np.full(size, 0x5A, dtype=dtype.storage)
    return Tensor(memory, np.zeros(size, dtype=bool), shape, _strides(shape), 0, dtype, buffer)


class OobMode(Enum):
    error = 0
    skip = 1


def dma_copy(*, dst, src, oob_mode=OobMode.error):
    """Copies what both sides name, but for the rows that `OobMode.skip` leaves out."""
    for side in (dst, src):
        if not isinstance(side, Tensor):
            raise StandInError(f"dma_copy takes tensors, not {type(side)}")
    if dst.shape != src.shape or dst.dtype != src.dtype:
        raise StandInError(f"copies {src.dtype.name} {src.shape} to {dst.dtype.name} {dst.shape}")
    if {dst.buffer, src.buffer} != {"hbm", "sbuf"}:
        raise StandInError(f"copies {src.buffer} to {dst.buffer}: one side is a tile in SBUF, the other lies in HBM")
    into, dropped = dst.addresses(oob_mode is OobMode.skip)
    origin, missing = src.addresses(oob_mode is OobMode.skip)
    live = ~(dropped | missing)
    into, origin = into[live], origin[live]
    src._check(origin)
    dst._check(into, written=False)
    if len(np.unique(into)) != into.size:
        raise StandInError("writes one element twice: the device orders no such writes")
    dst.memory[into] = src.memory[origin]
    dst.written[into] = True


nl = Names("nki.language", ndarray=ndarray, sbuf="sbuf", int32=INT32)
nisa = Names("nki.isa", dma_copy=dma_copy, oob_mode=OobMode)


def _tensor(value):
    if value.dtype not in DTYPES or not value.is_contiguous():
        raise StandInError(f"an argument is {value.dtype}, or not contiguous: the device has {list(DTYPES)}")
    signed, unsigned = BITS[value.dtype.itemsize]
    dtype = DTYPES[value.dtype]
    memory = value.view(signed).numpy().reshape(-1)
    memory = memory if dtype is INT32 else memory.view(unsigned)
    shape = tuple(value.shape)
    return Tensor(memory, np.ones(memory.size, dtype=bool), shape, _strides(shape), 0, dtype, "hbm")


def simulate(kernel):
    """`kernel` as a function of CPU tensors and integers: mutates them, returns the one that the kernel returns."""

    def run(*args):
        held = [SimpleNamespace(given=arg, tensor=_tensor(arg)) for arg in args if isinstance(arg, torch.Tensor)]
        tensors = iter(held)
        result = kernel(*(next(tensors).tensor if isinstance(arg, torch.Tensor) else arg for arg in args))
        for argument in held:
            if result is argument.tensor:
                return argument.given
        raise StandInError("the kernel returns something other than an argument that it mutated")

    return run

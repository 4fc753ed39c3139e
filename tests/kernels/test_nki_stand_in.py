"""The stand-in for NKI refuses what it does not know and what the device does not do."""

import pytest
import torch
from nki_stand_in import DTYPES, SBUF_PARTITION_BYTES, StandInError, dma_copy, ndarray, nisa, nl, simulate


def hbm_copy(x):
    dma_copy(dst=x, src=x)


def tile(shape=(2, 4), dtype=nl.int32):
    return ndarray(shape, dtype=dtype, buffer=nl.sbuf)


def loaded(x, shape):
    ids = tile(shape)
    dma_copy(dst=ids, src=x[0 : shape[0], 0 : shape[1]])
    return ids


def indexed(x, ids, count=2, width=4, offset=0, **settings):
    pattern = [[x.shape[1], count], [1, width]]
    return x.ap(pattern=pattern, offset=offset, vector_offset=ids, **({"indirect_dim": 0} | settings))


REFUSED = {
    "an unknown call": lambda x: nisa.tensor_copy(dst=x, src=x),
    "an unknown name": lambda x: nl.int64,
    "an unknown method": lambda x: x.permute((1, 0)),
    "a copy within HBM": hbm_copy,
    "more than 128 partitions": lambda x: tile((129, 1)),
    "a tile larger than a partition": lambda x: tile((1, SBUF_PARTITION_BYTES // 4 + 1)),
    "a tile that is no matrix": lambda x: tile((4,)),
    "a tile elsewhere": lambda x: ndarray((2, 4), dtype=nl.int32, buffer="psum"),
    "a read of what nothing has written": lambda x: dma_copy(dst=x[0:2, 0:4], src=tile()),
    "a slice past the end": lambda x: x[0:2, 0:5],
    "an empty slice": lambda x: x[2:2, 0:4],
    "a step": lambda x: x[0:4:2, 0:4],
    "a copy of another shape": lambda x: dma_copy(dst=tile(), src=x[0:4, 0:2]),
    "a copy of another dtype": lambda x: dma_copy(dst=tile(dtype=DTYPES[torch.float32]), src=x[0:2, 0:4]),
    "indices that nothing has written": lambda x: dma_copy(dst=tile(), src=indexed(x, tile((2, 1)))),
    "indices in HBM": lambda x: indexed(x, x[0:2, 0:1]),
    "indices in a row": lambda x: indexed(x, loaded(x, (1, 2))),
    "another dimension": lambda x: indexed(x, loaded(x, (2, 1)), indirect_dim=1),
    "columns past the tensor": lambda x: dma_copy(dst=tile(), src=indexed(x, loaded(x, (2, 1)), offset=13)),
    "an index past the tensor": lambda x: dma_copy(dst=tile(), src=indexed(x, loaded(x, (2, 1)))),
    "an index past the tensor, though skipped": lambda x: dma_copy(
        dst=tile(), src=indexed(x, loaded(x, (2, 1))), oob_mode=nisa.oob_mode.skip
    ),
    "a reshape of a tile": lambda x: tile().reshape((4, 2)),
    "a result that is no argument": lambda x: tile(),
}


@pytest.mark.parametrize("use", REFUSED.values(), ids=REFUSED)
def test_the_stand_in_refuses(use):
    memory = torch.arange(16, dtype=torch.int32).reshape(4, 4)

    def kernel(x):
        result = use(x)
        return x if result is None else result

    with pytest.raises(StandInError):
        simulate(kernel)(memory)


@pytest.mark.parametrize("keywords", [{"dge_mode": 1}, {"priority": 0}])
def test_the_stand_in_refuses_unknown_arguments(keywords):
    def kernel(x):
        dma_copy(dst=tile(), src=x[0:2, 0:4], **keywords)

    with pytest.raises(TypeError):
        simulate(kernel)(torch.zeros(4, 4, dtype=torch.int32))


def test_the_stand_in_refuses_a_scatter_to_one_row_twice_and_arguments_of_64_bits():
    def kernel(x):
        ids = loaded(x, (2, 1))
        dma_copy(dst=indexed(x, ids, width=1), src=ids)
        return x

    with pytest.raises(StandInError, match="twice"):
        simulate(kernel)(torch.zeros(4, 4, dtype=torch.int32))
    with pytest.raises(StandInError, match="int64"):
        simulate(kernel)(torch.zeros(4, 4, dtype=torch.int64))

"""topw_cuda.h: refusals, workspace sizes, valid C."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.cuda_kernel import CudaShape, EmulatedKernel
from tests.support.kernel import TABLE_TYPES, BlocksStruct, InputsStruct, OutputsStruct, TableStruct
from topw_deploy.errors import PluginError
from topw_deploy.sampling import TopWOptions

UNIFORM = TopWOptions(metric="uniform")
PLAIN = CudaShape(UNIFORM, batch=4, vocab=50_000, edits=8)


def table(
    tokens: int = 50_000, hidden: int = 64, dtype: str = "float16", blocks: BlocksStruct | None = None
) -> TableStruct:
    return TableStruct(None, tokens, hidden, TABLE_TYPES[dtype], 0, None, None, None, blocks or BlocksStruct())


def with_table(described: TableStruct) -> CudaShape:
    return replace(PLAIN, options=TopWOptions(metric="cosine"), table=described)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (replace(PLAIN, vocab=524_289), "the vocabulary has no token, or more than 524288"),
        (replace(PLAIN, vocab=0), "the vocabulary has no token"),
        (replace(PLAIN, options=replace(UNIFORM, top_m=4097)), "top_m is larger than 4096"),
        (replace(PLAIN, logits_type="float32", edits=-1), "edits to a row"),
        (replace(PLAIN, options=replace(UNIFORM, potential="knn", knn_k=17)), "knn_k is more than 16"),
        (replace(PLAIN, batch=1 << 17), "the batch has more than 65536 rows"),
        (with_table(table(hidden=8193)), "no coordinate, or more than 8192"),
        (with_table(table(tokens=49_999)), "fewer rows than the vocabulary"),
        (with_table(table(dtype="uint8")), "of a type that is not read"),
        (with_table(table(dtype="uint8", blocks=BlocksStruct(3, 32, 1))), "of a type that is not read"),
    ],
)
def test_shapes_that_the_kernels_do_not_support_are_refused_with_the_reason(
    kernel: EmulatedKernel, shape: CudaShape, words: str
) -> None:
    assert words in kernel.refusal(shape)
    assert kernel.workspace_bytes(shape) == 0
    assert kernel.control_bytes(shape) == 0


@pytest.mark.parametrize(
    "shape",
    [
        PLAIN,
        replace(PLAIN, vocab=524_288, logits_type="bfloat16", batch=256),
        replace(PLAIN, vocab=900, options=replace(UNIFORM, top_m=5000)),
        replace(PLAIN, options=replace(UNIFORM, top_m=4096, potential="knn", knn_k=16)),
        with_table(table(hidden=8192)),
        with_table(table(dtype="uint8", blocks=BlocksStruct(8, 32, 1))),
        with_table(table(dtype="uint4", blocks=BlocksStruct(4, 128, 10))),
    ],
)
def test_the_workspace_grows_with_batch_and_edits(kernel: EmulatedKernel, shape: CudaShape) -> None:
    assert kernel.refusal(shape) == ""
    control, room = kernel.control_bytes(shape), kernel.workspace_bytes(shape)
    assert 0 < control < room
    assert control % 256 == room % 256 == 0
    for more in (replace(shape, batch=shape.batch + 100), replace(shape, edits=shape.edits + 100)):
        assert kernel.workspace_bytes(more) > room or shape.edits * 64 > shape.vocab


def test_a_call_that_does_not_fit_its_shape_is_not_launched(kernel: EmulatedKernel) -> None:
    room = np.zeros(kernel.control_bytes(PLAIN) + 256, np.uint8)
    address = room.ctypes.data + -room.ctypes.data % 256
    for batch, vocab, edits in ((5, 50_000, 8), (4, 49_999, 8), (4, 50_000, 9), (-1, 50_000, 0)):
        with pytest.raises(PluginError, match="not launched"):
            kernel.launch(PLAIN, None, InputsStruct(batch, vocab, edits, 0), OutputsStruct(), address, address)
    with pytest.raises(PluginError, match="not launched"):
        kernel.launch(with_table(table()), None, InputsStruct(1, 50_000, 0, 0), OutputsStruct(), address, address)


def test_a_mask_of_another_width_is_not_launched(kernel: EmulatedKernel) -> None:
    shape = CudaShape(UNIFORM, 1, 300)
    for words in (-1, 1, 9, 11):
        with pytest.raises(PluginError, match="not launched"):
            kernel.launch(shape, None, InputsStruct(1, 300, 0, words), OutputsStruct(), *kernel._room_for(shape))

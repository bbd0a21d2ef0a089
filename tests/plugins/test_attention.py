"""Attention to a static cache: the native operator, and the function that it replaces."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
import pytest

from tests.plugins.test_product import open_session
from topw_deploy.export.native_functions import call_functions

SLOTS, TOKENS = 640, 600
STATES = ("key", "value")


class Case(NamedTuple):
    """A node's attributes and inputs; `window_slots` for a state that keeps only the window."""

    heads: int = 6
    kv_heads: int = 2
    size: int = 64
    packed: bool = False
    rotary: int = 0  # elements of a head
    attributes: Mapping[str, Any] = MappingProxyType({})
    bias: bool = False
    sink: bool = False
    window_slots: int = 0
    borrows: bool = False


CASES = {
    "rotated": Case(rotary=64),
    "packed, partly rotated neighbours": Case(packed=True, rotary=32, attributes={"rotary_interleaved": 1}),
    "one key head, wide": Case(heads=8, kv_heads=1, size=256),
    "one query head a key, narrow": Case(heads=4, kv_heads=4, size=24),
    "many queries a key": Case(heads=72, kv_heads=1, size=72),
    "window": Case(size=16, attributes={"local_window_size": 100}),
    "window kept": Case(size=16, rotary=16, attributes={"local_window_size": 40}, window_slots=40),
    "bias, cap and sink": Case(bias=True, sink=True, attributes={"softcap": 5.0}),
    "another layer's states": Case(borrows=True),
}


def attention_model(case: Case, *, calls: bool) -> ir.Model:
    """A model of one node, with the exporter's call or onnxruntime's own operator."""
    kind, slots = ir.DataType.FLOAT, case.window_slots or "slots"
    width = case.heads * case.size + (2 * case.kv_heads * case.size if case.packed else 0)
    values = {"query": ir.val("query", kind, ["batch", "columns", width])}
    for name in STATES:
        values[name] = ir.val(name, kind, ["batch", "new", case.kv_heads * case.size])
    for name in STATES:
        values[f"past_{name}"] = ir.val(f"past_{name}", kind, ["batch", case.kv_heads, slots, case.size])
    values["last"] = ir.val("last", ir.DataType.INT32, ["batch"])
    values["total"] = ir.val("total", ir.DataType.INT32, [1])
    for name in ("cos", "sin"):
        values[name] = ir.val(name, kind, [TOKENS, case.rotary // 2])
    values["bias"] = ir.val("bias", kind, [1, case.heads, "columns", "total_tokens"])
    values["sink"] = ir.val("sink", kind, [case.heads])
    unused = {*(STATES if case.packed else ()), *(() if case.rotary else ("cos", "sin"))}
    unused |= {name for name, used in (("bias", case.bias), ("sink", case.sink)) if not used}
    inputs = [None if name in unused else value for name, value in values.items()]
    inputs.insert(list(values).index("bias"), None)
    sizes = {
        "num_heads": case.heads,
        "kv_num_heads": case.kv_heads,
        "scale": case.size**-0.5,
        "do_rotary": int(case.rotary > 0),
    }
    sizes |= {"sliding_window_cache": 1} if case.window_slots else {}
    outputs = 1 if case.borrows else 3
    while inputs[-1] is None:
        inputs.pop()
    node = ir.node(
        "GroupQueryAttention", inputs, sizes | dict(case.attributes), domain="com.microsoft", num_outputs=outputs
    )
    for value, name in zip(node.outputs, ("output", "present_key", "present_value"), strict=False):
        value.name, value.type = name, ir.TensorType(kind)
    graph_inputs = [value for name, value in values.items() if name not in unused]
    graph_inputs.append(ir.val("row_lengths", ir.DataType.INT64, ["batch"]))
    imports = {"": 21, "com.microsoft": 1}
    graph = ir.Graph(graph_inputs, node.outputs, nodes=[node], opset_imports=imports, name="attention")
    model = ir.Model(graph, ir_version=10)
    if calls:
        call_functions(model, 21)
        suffix = "ReadOnly" if case.borrows else ""
        assert [(node.domain, node.op_type) for node in model.graph] == [("topw", "GroupQueryAttention" + suffix)]
    return model


class Cache:
    """Rows of random tokens, which a session reads run by run into buffers that it updates in place."""

    def __init__(self, case: Case, rows: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.case = case
        self.query = rng.standard_normal((rows, TOKENS, case.heads * case.size)).astype(np.float32)
        self.new = rng.standard_normal((2, rows, TOKENS, case.kv_heads * case.size)).astype(np.float32)
        self.angles = rng.uniform(0, 6.28, (TOKENS, case.rotary // 2)).astype(np.float32)
        self.bias = rng.standard_normal((1, case.heads, TOKENS, TOKENS)).astype(np.float32)
        self.sink = rng.standard_normal(case.heads).astype(np.float32)
        shape = (rows, case.kv_heads, case.window_slots or SLOTS, case.size)
        self.states = np.zeros((2, *shape), np.float32)
        if case.borrows:
            self.states[:, :, :, :TOKENS] = rng.standard_normal((2, *shape[:2], TOKENS, case.size))

    def run(self, session: Any, starts: list[int], lengths: list[int], rows: slice = slice(None)) -> list[np.ndarray]:
        """The outputs of each row's tokens."""
        columns, case = max(lengths), self.case
        ids = [np.minimum(np.arange(start, start + columns), TOKENS - 1) for start in starts]
        query = np.stack([array[i] for array, i in zip(self.query[rows], ids, strict=True)])
        new = np.stack([[array[i] for array, i in zip(part[rows], ids, strict=True)] for part in self.new])
        feeds = {"query": np.concatenate([query, *new], axis=-1) if case.packed else query}
        if not case.packed:
            feeds |= dict(zip(STATES, new[:, :, : 0 if case.borrows else columns], strict=True))
        feeds["last"] = np.array(starts, np.int32) + columns - 1
        feeds["total"] = np.array([max(starts) + columns], np.int32)
        feeds |= {"cos": np.cos(self.angles), "sin": np.sin(self.angles), "sink": self.sink}
        feeds["bias"] = self.bias[:, :, starts[0] : starts[0] + columns, : max(starts) + columns]
        feeds["row_lengths"] = np.array(lengths, np.int64)
        names, binding = {node.name for node in session.get_inputs()}, session.io_binding()
        for name, array in feeds.items():
            if name in names:
                binding.bind_cpu_input(name, np.ascontiguousarray(array))
        for name, state in zip(STATES, self.states[:, rows], strict=True):
            place = ("cpu", 0, np.float32, state.shape, state.ctypes.data)
            binding.bind_input(f"past_{name}", *place)
            if not case.borrows:
                binding.bind_output(f"present_{name}", *place)
        binding.bind_output("output")
        session.run_with_iobinding(binding)
        output = binding.get_outputs()[-1].numpy()
        return [row[:length] for row, length in zip(output, lengths, strict=True)]


@pytest.fixture
def library(native_library: Path) -> Any:
    """The library with its best instruction set; the one in use before is restored."""
    handle = ctypes.CDLL(str(native_library))
    handle.topw_instruction_set.restype = ctypes.c_char_p
    before = handle.topw_instruction_set()
    next(name for name in (b"avx512", b"avx2", b"neon", b"generic") if not handle.topw_use_instruction_set(name))
    yield handle
    handle.topw_use_instruction_set(before)


def read_alone(session: Any, cache: Cache, row: int, chunks: list[int]) -> np.ndarray:
    """The outputs of a row that is read alone, in chunks of so many tokens."""
    outputs, start = [], 0
    for columns in chunks:
        outputs += cache.run(session, [start], [columns], slice(row, row + 1))
        start += columns
    return np.concatenate(outputs)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_function_and_the_operator_compute_what_onnxruntimes_operator_computes(
    native_library: Path, case: Case
) -> None:
    chunks = [300, 1, 200, 1, 1] if not case.borrows else [300, 1, 1]
    plain, function, native = (Cache(case, 1) for _ in range(3))
    expected = read_alone(open_session(attention_model(case, calls=False)), plain, 0, chunks)
    found = read_alone(open_session(attention_model(case, calls=True)), function, 0, chunks)
    np.testing.assert_array_equal(found, expected)
    session = open_session(attention_model(case, calls=True), native_library, threads=2)
    np.testing.assert_allclose(read_alone(session, native, 0, chunks), expected, atol=3e-6, rtol=3e-6)
    np.testing.assert_allclose(native.states, plain.states, atol=2e-6)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_rows_bits_depend_on_no_other_row_nor_on_the_columns_of_a_run_nor_on_the_instruction_set(
    native_library: Path, library: Any, case: Case
) -> None:
    session = open_session(attention_model(case, calls=True), native_library, threads=2)
    steps = Cache(case, 3)
    expected = [read_alone(session, steps, row, [1] * 290 + [30] + [1] * 10) for row in range(3)]
    ends = [330, 20, 290]
    for name in (b"avx512", b"avx2", None):
        if name is not None and library.topw_use_instruction_set(name):
            continue
        together, starts = Cache(case, 3), [0, 0, 0]
        outputs: list[list[np.ndarray]] = [[], [], []]
        while starts[0] < ends[0]:
            width = 1 if starts[0] % 3 == 2 or case.bias else 61
            lengths = [min(width, end - start) for start, end in zip(starts, ends, strict=True)]
            if case.bias:  # whose columns belong to one position
                lengths = [length if start == starts[0] else 0 for length, start in zip(lengths, starts, strict=True)]
            for row, output in enumerate(together.run(session, starts, lengths)):
                outputs[row].append(output)
            starts = [start + length for start, length in zip(starts, lengths, strict=True)]
        for row, end in enumerate(ends):
            np.testing.assert_array_equal(np.concatenate(outputs[row]), expected[row][:end], err_msg=f"{name} {row}")
        if not case.borrows and not case.window_slots:
            for row, end in enumerate(ends):
                np.testing.assert_array_equal(together.states[:, row, :, :end], steps.states[:, row, :, :end])


def test_a_query_with_nan_or_infinity_is_nan_and_no_other_is(native_library: Path) -> None:
    case = Case()
    session = open_session(attention_model(case, calls=True), native_library)
    clean, broken = Cache(case, 1), Cache(case, 1)
    broken.query[0, 5, 0], broken.query[0, 6, 70] = np.nan, np.inf
    expected, found = (read_alone(session, cache, 0, [300])[:, : 2 * case.size] for cache in (clean, broken))
    assert np.isnan(found[5, : case.size]).all()
    assert np.isnan(found[6, case.size :]).all()
    np.testing.assert_array_equal(np.delete(found, (5, 6), axis=0), np.delete(expected, (5, 6), axis=0))


def test_more_tokens_than_a_state_has_slots_are_refused(native_library: Path) -> None:
    session = open_session(attention_model(Case(), calls=True), native_library)
    with pytest.raises(Exception, match="641 tokens for 640 slots"):
        Cache(Case(), 1).run(session, [636], [5])

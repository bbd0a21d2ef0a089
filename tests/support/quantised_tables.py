"""Tables in every form of GatherBlockQuantized, and onnxruntime's dequantised rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
import onnxruntime as ort

from tests.support.kernel import KernelBlocks
from topw_deploy.dtypes import ELEMENT_TYPES


@dataclass(frozen=True)
class Form:
    """Types and bits of codes and scales, zero points, block size, row width."""

    element: str = "uint8"
    bits: int = 4
    zero_points: bool = False
    scales: str = "float32"
    block_size: int = 16
    hidden: int = 48  # an odd number of blocks: zero points start inside a byte

    @property
    def name(self) -> str:
        zeros = "zeros" if self.zero_points else "none"
        return f"{self.element}x{self.bits}-{zeros}-{self.scales}-{self.block_size}-{self.hidden}"


FORMS = [
    *(Form(bits=bits, zero_points=zeros) for bits in (4, 8) for zeros in (False, True)),
    *(Form(element, zero_points=zeros) for element in ("uint4", "int4") for zeros in (False, True)),
    Form(bits=4, zero_points=True, scales="float16", block_size=32, hidden=64),
    Form(bits=8, scales="float16", block_size=128, hidden=40),
    Form("int4", zero_points=True, scales="float16", block_size=64, hidden=70),
    Form(bits=4, block_size=32, hidden=50),
]


@dataclass(frozen=True)
class Quantised:
    """A table of random codes [tokens, bytes], as `blocks` of the kernel and as `tensors` of a graph."""

    form: Form
    codes: np.ndarray
    blocks: KernelBlocks
    tensors: list[onnx.TensorProto]

    def rows(self) -> np.ndarray:
        """float32 [tokens, hidden], from onnxruntime."""
        ids = onnx.helper.make_tensor_value_info("ids", onnx.TensorProto.INT64, [None])
        node = onnx.helper.make_node(
            "GatherBlockQuantized", ["codes", "ids", *[t.name for t in self.tensors[1:]]], ["rows"],
            domain="com.microsoft", bits=self.form.bits, block_size=self.form.block_size, gather_axis=0,
            quantize_axis=1,
        )  # fmt: skip
        out = onnx.helper.make_tensor_value_info("rows", self.tensors[1].data_type, None)
        graph = onnx.helper.make_graph([node], "lookup", [ids], [out], self.tensors)
        imports = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
        model = onnx.helper.make_model(graph, opset_imports=imports, ir_version=10)
        session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        return np.asarray(session.run(None, {"ids": np.arange(len(self.codes))})[0]).astype(np.float32)


def quantised_table(form: Form, tokens: int, seed: int) -> Quantised:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (tokens, form.hidden * form.bits // 8), dtype=np.uint8)
    codes[1], codes[3] = codes[0], codes[2]  # duplicates, as in real tables
    blocks = -(-form.hidden // form.block_size)
    scales = rng.choice([0.0, 0.01, 0.013, 0.2, 1e-4], (tokens, blocks)).astype(form.scales)
    scales[1], scales[3] = scales[0], scales[2]
    zeros = None
    if form.zero_points:
        size = (tokens, -(-blocks * form.bits // 8)) if form.element == "uint8" else (-(-tokens * blocks // 2),)
        zeros = rng.integers(0, 256, size, dtype=np.uint8)
    kind = ELEMENT_TYPES[form.element].number
    wide = codes.shape if form.element == "uint8" else (tokens, form.hidden)
    tensors = [
        onnx.helper.make_tensor("codes", kind, wide, codes.tobytes(), raw=True),
        onnx.numpy_helper.from_array(scales, "scales"),
    ]
    if zeros is not None:
        shape = zeros.shape if form.element == "uint8" else scales.shape
        tensors.append(onnx.helper.make_tensor("zeros", kind, shape, zeros.tobytes(), raw=True))
    described = KernelBlocks(form.bits, form.block_size, scales, zeros, form.element)
    return Quantised(form, codes, described, tensors)

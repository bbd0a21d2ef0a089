"""Which nodes TensorRT's parser and builder support.

Sources: NVIDIA's documentation of TensorRT 10.15 to 11, and the parser of TensorRT-RTX 1.7.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from topw_deploy.onnx_file.model import Node
from topw_deploy.tensorrt.scope import Scope

NEWEST_OPSET = 25
LARGEST_K = 3840  # TensorRT's TopK selects at most this many values
FUSED_HEADS = range(16, 257, 8)  # head sizes of Attention over several tokens

_NATIVE = """
Abs Acos Acosh Add And ArgMax ArgMin Asin Asinh Atan Atanh Attention AveragePool BatchNormalization
BlackmanWindow Cast CastLike Ceil Celu Clip Concat Constant ConstantOfShape Conv ConvTranspose Cos Cosh CumSum
DeformConv DepthToSpace DequantizeLinear Div Dropout Einsum Elu Equal Erf Exp Expand EyeLike Flatten Floor GRU
Gather GatherElements GatherND Gelu Gemm GlobalAveragePool GlobalLpPool GlobalMaxPool Greater GreaterOrEqual
GridSample GroupNormalization HammingWindow HannWindow HardSigmoid HardSwish Hardmax Identity If ImageScaler
InstanceNormalization IsInf IsNaN LRN LSTM LayerNormalization LeakyRelu Less LessOrEqual Log LogSoftmax Loop
LpNormalization LpPool MatMul Max MaxPool Mean MeanVarianceNormalization Min Mish Mod Mul Neg NonMaxSuppression
NonZero Not OneHot Or PRelu Pad ParametricSoftplus Pow QuantizeLinear RMSNormalization RNN RandomNormal
RandomNormalLike RandomUniform RandomUniformLike Range Reciprocal ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp
ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Reshape Resize ReverseSequence RoiAlign
RotaryEmbedding Round STFT ScaledTanh Scan Scatter ScatterElements ScatterND Selu Shape Shrink Sigmoid Sign Sin
Sinh Size Slice Softmax Softplus Softsign SpaceToDepth Split Sqrt Squeeze Sub Sum Swish Tan Tanh TensorScatter
ThresholdedRelu Tile TopK Transpose Trilu Unsqueeze Upsample Where Xor
"""
NATIVE = frozenset(_NATIVE.split())
"""The standard operators that the parser knows."""

SINCE: Mapping[str, tuple[int, ...]] = {
    "Attention": (10, 14),
    "RMSNormalization": (10, 15),
    "RotaryEmbedding": (10, 15),
    "TensorScatter": (10, 15),
    "Swish": (11, 0),
}
"""Operator -> the first TensorRT that has it. Left out: operators of 10.3, the oldest with the plugin interface."""

_TYPES = {"float32", "float16", "bfloat16", "float64", "int32", "int64", "bool"}  # double is computed as float32
_QUANTISED = {"int8", "uint8", "int4", "float8e4m3fn", "float4e2m1"}  # for QuantizeLinear and DequantizeLinear
_REDUCTIONS = {"L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare"}


def refusal_reason(node: Node, scope: Scope) -> str | None:
    """Why TensorRT refuses a node, as a clause; None if no reason is known."""
    if node.domain not in ("", "ai.onnx"):
        return f"TensorRT supports no operators of {node.domain}"
    if node.op_type not in NATIVE:
        return "TensorRT has no such operator"
    return next(filter(None, _refusal_reasons(node, scope)), None)


def _refusal_reasons(node: Node, scope: Scope) -> Iterator[str | None]:
    yield _type_refusal(node, scope)
    if node.op_type.removeprefix("Reduce") in _REDUCTIONS and node.op_type.startswith("Reduce"):
        yield _computed_input_refusal(node, scope, 1, "axes")
    rule = _RULES.get(node.op_type)
    if rule is not None:
        yield rule(node, scope)


def _type_refusal(node: Node, scope: Scope) -> str | None:
    quantises = node.op_type in ("QuantizeLinear", "DequantizeLinear")
    for name in node.inputs:
        dtype = scope.types.get(name)
        if dtype is not None and dtype not in _TYPES and not (quantises and dtype in _QUANTISED):
            return f"it reads {dtype}, which TensorRT does not support for this operator"
    return None


def _computed_input_refusal(node: Node, scope: Scope, place: int, what: str) -> str | None:
    if len(node.inputs) <= place or not node.inputs[place] or node.inputs[place] in scope.constants:
        return None
    return f"its {what} must be stored in the file, but are computed"


def _count_given(names: Iterable[str]) -> int:
    return sum(1 for name in names if name)


def _attention_refusal(node: Node, scope: Scope) -> str | None:
    if _count_given(node.outputs) > 1:
        return "TensorRT supports Attention only with one output"
    if _count_given(node.inputs[4:6]):
        return "TensorRT supports Attention only without past keys and values"
    if _count_given(node.inputs[6:7]):
        return "TensorRT ignores the input nonpad_kv_seqlen; it needs a mask"
    if node.attributes.get("softcap"):
        return "TensorRT does not support softcap"
    shape = scope.shapes.get(node.inputs[0], (0, 0, 0, 64))
    if len(shape) != 4:
        return "TensorRT requires a separate axis for heads"
    if scope.types.get(node.inputs[0]) == "float32":
        return "TensorRT supports this operator only in half precision"
    if isinstance(shape[3], int) and shape[3] not in FUSED_HEADS:
        return f"TensorRT supports only head sizes of 16 to 256 in steps of 8 here, but this one is {shape[3]}"
    return None


def _tensor_scatter_refusal(node: Node, scope: Scope) -> str | None:
    cache = scope.shapes.get(node.inputs[0])
    if node.attributes.get("mode", "linear") != "linear":
        return "TensorRT writes caches only from front to back"
    if cache is None:
        return None
    if len(cache) != 4 or node.attributes.get("axis", -2) not in (-2, 2):
        return "TensorRT writes caches only along the third of four axes"
    if not isinstance(cache[2], int):
        return f"TensorRT requires a fixed cache length, but it is {cache[2]!r}"
    return None


def _top_k_refusal(node: Node, scope: Scope) -> str | None:
    constant = scope.constants.get(node.inputs[1]) if len(node.inputs) > 1 else None
    if constant is not None and constant.numbers and constant.numbers[0] > LARGEST_K:
        return f"it selects {constant.numbers[0]} values, but TensorRT supports at most {LARGEST_K}"
    return None  # `sorted` may be 0: TensorRT sorts all the same


def _scatter_refusal(node: Node, scope: Scope) -> str | None:
    how = node.attributes.get("reduction", "none")
    return None if how == "none" else f"TensorRT scatters only without a reduction, but this is {how!r}"


def _outputs_refusal(node: Node, scope: Scope) -> str | None:
    return None if _count_given(node.outputs) < 2 else f"TensorRT supports {node.op_type} only with one output"


def _if_refusal(node: Node, scope: Scope) -> str | None:
    return "TensorRT does not build an If inside another for a dynamic batch" if "If" in scope.within else None


def _loop_refusal(node: Node, scope: Scope) -> str | None:
    return f"TensorRT does not support {node.op_type} inside an If" if "If" in scope.within else None


def _non_zero_refusal(node: Node, scope: Scope) -> str | None:
    return "its output's size depends on values, for which NVIDIA's parser needs a plugin"


def _cumulative_sum_refusal(node: Node, scope: Scope) -> str | None:
    return _computed_input_refusal(node, scope, 1, "axis")


_RULES: Mapping[str, Callable[[Node, Scope], str | None]] = {
    "Attention": _attention_refusal,
    "CumSum": _cumulative_sum_refusal,
    "If": _if_refusal,
    "LayerNormalization": _outputs_refusal,
    "Loop": _loop_refusal,
    "MaxPool": _outputs_refusal,
    "NonZero": _non_zero_refusal,
    "Scan": _loop_refusal,
    "ScatterElements": _scatter_refusal,
    "ScatterND": _scatter_refusal,
    "TensorScatter": _tensor_scatter_refusal,
    "TopK": _top_k_refusal,
}

"""The sampler as an ONNX function (docs/contract/graph.md, section 8)."""

from topw_deploy.export.tail.function import build_tail
from topw_deploy.export.tail.spec import (
    DOMAIN,
    DOMAIN_VERSION,
    FORMS,
    GEOMETRY_INPUTS,
    OP_TYPE,
    TAIL_INPUTS,
    TailSpec,
    tail_attributes,
    tail_inputs,
    tail_outputs,
)

__all__ = [
    "DOMAIN",
    "DOMAIN_VERSION",
    "FORMS",
    "GEOMETRY_INPUTS",
    "OP_TYPE",
    "TAIL_INPUTS",
    "TailSpec",
    "build_tail",
    "tail_attributes",
    "tail_inputs",
    "tail_outputs",
]

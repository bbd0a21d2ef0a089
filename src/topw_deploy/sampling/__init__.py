"""Top-W and the other sampling rules: parameters, kept sets, draws.

`reference`: Top-W, literally, in float64: the definition that every other implementation is compared with.
`rules`: the other rules, which a row may use instead of Top-W.
`row`: a row from logits to token, with edits, masks and draw.
`torch`: Top-W for batches of tensors on any device, and `processor` for transformers. Only these import torch.
"""

from topw_deploy.sampling.geometry import Geometry, median_distance
from topw_deploy.sampling.parameters import TopWOptions, TopWParameters, as_float32, preset_parameters
from topw_deploy.sampling.reference import FLOAT32_TIES, FLOAT64_TIES, crop
from topw_deploy.sampling.row import SampledRow, apply_edits, draw, pack_mask, sample_row
from topw_deploy.sampling.rules import RULES, RuleParameters
from topw_deploy.sampling.seeds import uniform_for

__all__ = [
    "FLOAT32_TIES",
    "FLOAT64_TIES",
    "RULES",
    "Geometry",
    "RuleParameters",
    "SampledRow",
    "TopWOptions",
    "TopWParameters",
    "apply_edits",
    "as_float32",
    "crop",
    "draw",
    "median_distance",
    "pack_mask",
    "preset_parameters",
    "sample_row",
    "uniform_for",
]

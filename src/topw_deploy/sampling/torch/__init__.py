"""Top-W on torch tensors: a batch of rows, on the device of the logits.

Decisions use float64; on MPS, which lacks it, float32 with looser ties (docs/contract/graph.md, section 4). Tested only
on the CPU.
"""

from topw_deploy.sampling.torch.crop import Stage, TensorCrop, crop_rows
from topw_deploy.sampling.torch.geometry import TensorGeometry
from topw_deploy.sampling.torch.rows import TensorParameters
from topw_deploy.sampling.torch.rules import rule_rows

__all__ = ["Stage", "TensorCrop", "TensorGeometry", "TensorParameters", "crop_rows", "rule_rows"]

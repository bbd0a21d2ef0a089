"""Top-W on torch tensors: a batch of rows, on the device of the logits. Nothing else in `sampling` imports it.

Decisions are made in float64, on Apple's GPUs, which have none, in float32 with the looser ties of
docs/contract/graph.md, section 4. Only the CPU has been tested.
"""

from topw_deploy.sampling.torch.crop import Stage, TensorCrop, crop_rows
from topw_deploy.sampling.torch.geometry import TensorGeometry
from topw_deploy.sampling.torch.rows import TensorParameters

__all__ = ["Stage", "TensorCrop", "TensorGeometry", "TensorParameters", "crop_rows"]

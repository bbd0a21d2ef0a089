"""Top-W on torch tensors: a batch of rows, on the device where the logits are. Needs torch; nothing imports it unasked.

Everything that decides is float64. Apple's GPUs have none: there it is float32, with the looser ties of
docs/graph.md, section 4. Only the CPU path was ever run.
"""

from topw_deploy.sampling.tensors.crop import Stage, TensorCrop, crop_rows
from topw_deploy.sampling.tensors.geometry import TensorGeometry
from topw_deploy.sampling.tensors.rows import TensorParameters

__all__ = ["Stage", "TensorCrop", "TensorGeometry", "TensorParameters", "crop_rows"]

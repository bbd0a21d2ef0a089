"""Top-W on torch tensors: a batch of rows, on the device where the logits are. Needs torch; nothing imports it unasked.

Everything that decides is float64. Apple's GPUs have none: there it is float32, with the looser ties of
docs/contract/graph.md, section 4. Only the CPU path was ever run.
"""

from topw_deploy.sampling.torch.crop import Stage, TensorCrop, crop_rows
from topw_deploy.sampling.torch.geometry import TensorGeometry
from topw_deploy.sampling.torch.rows import TensorParameters

__all__ = ["Stage", "TensorCrop", "TensorGeometry", "TensorParameters", "crop_rows"]

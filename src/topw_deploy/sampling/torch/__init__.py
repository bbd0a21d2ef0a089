"""Top-W on torch tensors: a batch of rows, on the device of the logits.

Top-W in transformers (`processors`) uses this package. `sampling.fast` would need the logits on the host, and copying
them would sync the device at every step.

Decisions use float64. MPS lacks it, so decisions there use float32 with looser ties (docs/contract/graph.md,
section 4). Tested only on the CPU.
"""

from topw_deploy.sampling.torch.crop import CropStage, TensorCrop, crop_rows
from topw_deploy.sampling.torch.geometry import TensorGeometry
from topw_deploy.sampling.torch.rows import TensorParameters
from topw_deploy.sampling.torch.rules import rule_rows

__all__ = ["CropStage", "TensorCrop", "TensorGeometry", "TensorParameters", "crop_rows", "rule_rows"]

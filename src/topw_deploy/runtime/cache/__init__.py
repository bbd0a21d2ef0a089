"""Key-value caches in the forms that docs/contract/graph.md section 8 names: how each takes prompts, and what a step
adds.

concat: onnxruntime makes a longer cache at every step. static and shared: one buffer, bound as past and present alike.
"""

from topw_deploy.runtime.cache.caches import Cache, Caches, takes_ragged_batches
from topw_deploy.runtime.cache.names import check_layout, check_supported

__all__ = ["Cache", "Caches", "check_layout", "check_supported", "takes_ragged_batches"]

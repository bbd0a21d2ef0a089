"""Key-value caches, one class per form of docs/contract/graph.md section 8.

concat: each step takes the states as inputs and returns longer ones.
static, shared: the graph updates one buffer in place.
"""

from topw_deploy.runtime.cache.caches import Cache, Caches, check_layout, check_supported, new_caches

__all__ = ["Cache", "Caches", "check_layout", "check_supported", "new_caches"]

"""Key-value caches, one class per form of docs/contract/graph.md section 8.

concat: every step returns a longer tensor.
static, shared: one buffer, updated in place.
"""

from topw_deploy.runtime.cache.caches import Cache, Caches, check_layout, check_supported, new_caches

__all__ = ["Cache", "Caches", "check_layout", "check_supported", "new_caches"]

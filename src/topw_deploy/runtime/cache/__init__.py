"""Key-value caches, one class per form of docs/contract/graph.md section 8.

concat: every step returns a longer tensor.
static, shared: one buffer, updated in place.
"""

from topw_deploy.runtime.cache.caches import Cache, Caches, caches_of, check_layout, check_supported

__all__ = ["Cache", "Caches", "caches_of", "check_layout", "check_supported"]

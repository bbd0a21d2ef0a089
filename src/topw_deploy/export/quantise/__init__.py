"""Weight-only quantisation (docs/guide/quantisation.md)."""

from topw_deploy.export.quantise.rewrite import quantise
from topw_deploy.export.quantise.rounding import BLOCK_SIZES, DTYPE_BITS, Quantisation

__all__ = ["BLOCK_SIZES", "DTYPE_BITS", "Quantisation", "quantise"]

"""Packing what a GPU host without a network needs: `python -m benchmarks.gpu pack`, where a package index is.

`command` reads the options, `components` makes one folder per component, `fatbin` zeroes GPU code of other
architectures, `archives` writes a folder as .tar.xz files of at most the limit. `benchmarks/gpu/unpack.py` is the other
side.
"""

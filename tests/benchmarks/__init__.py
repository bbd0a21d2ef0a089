"""Tests of `benchmarks`; those of `benchmarks.gpu` are in `tests/gpu`."""

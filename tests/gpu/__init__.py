"""Tests of `benchmarks.gpu`, the GPU command."""

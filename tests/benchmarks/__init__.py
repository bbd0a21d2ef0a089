"""Tests of `benchmarks`; only these and `tests/gpu`, which tests `benchmarks.gpu`, import it."""

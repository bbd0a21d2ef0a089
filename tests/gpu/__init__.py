"""Tests of `benchmarks.gpu`, the GPU command; hence they import it, as `tests/benchmarks` imports the rest."""

"""Measurements that the documentation quotes; each module is one command, `python -m benchmarks` runs them all."""

"""Measurements that anyone can repeat: `topw bench sampler` and `topw bench decode` (docs/guide/benchmarking.md)."""

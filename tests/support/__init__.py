"""Cases, tiny models and device doubles for tests, fuzz and benchmarks."""

"""Cases, tiny models and doubles of devices that tests, fuzz and benchmarks share."""

"""Long random comparisons of every sampler with the reference."""

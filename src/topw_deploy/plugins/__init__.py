"""Native implementations of the sampler node; see README.md."""

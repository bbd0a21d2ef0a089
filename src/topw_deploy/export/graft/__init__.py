"""Setting the sampler onto a decoder."""

"""Add the sampler to a decoder."""

"""Find and read the source model."""

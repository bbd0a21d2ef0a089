"""More than one machine: Ray Serve, Triton, containers."""

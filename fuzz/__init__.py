"""Long random tests: of every sampler against the reference, of the engine, and of every loader of files."""

"""Fields of the requests. Undeclared fields are parameters of the engine, or unknown: see `parameters`."""

"""Fields of the requests. What is not declared is a parameter of the engine, or unknown: see `parameters`."""

"""`topw bench` (docs/guide/benchmarking.md).

- `sides`: the rows of a table, and which of them can run here
- `process`, `workers`: one process per environment
- `sampler`, `decode`, `rules`, `serve`: the commands
"""

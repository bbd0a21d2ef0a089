"""`topw bench sampler` and `topw bench decode` (docs/guide/benchmarking.md).

- `sides`: the rows of a table, and which of them can run here
- `process`, `workers`: one process per environment
- `sampler`, `decode`: the two commands
"""

"""`topw bench sampler` and `topw bench decode` (docs/guide/benchmarking.md).

- `sides`: table rows, and which can run here
- `process`, `workers`: one process per environment
- `sampler`, `decode`: the two commands
"""

"""`topw bench sampler` and `topw bench decode` (docs/guide/benchmarking.md).

- `sides`: table rows, and which can run here
- `process`, `workers`: one process per environment
- `measurement`: timing and the machine
- `report`, `picture`: tables, sentences, PNGs
- `sampler`, `decode`: the two commands
"""

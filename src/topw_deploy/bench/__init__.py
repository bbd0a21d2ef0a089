"""`topw bench sampler` and `topw bench decode` (docs/guide/benchmarking.md).

- `sides`: the rows of a table, and which can run here
- `process`, `workers`: one process per environment
- `measurement`: timing and the machine
- `report`, `picture`: tables, sentences and PNGs
- `sampler`, `decode`: the two commands; `run.py` of each holds its run and report
"""

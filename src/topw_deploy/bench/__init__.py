"""`topw bench sampler` and `topw bench decode`: measurements anyone can repeat (docs/guide/benchmarking.md).

| module | holds |
|---|---|
| `sides` | the rows of a table, and which of them can run here |
| `process`, `workers` | a process per environment: this end, and the files that run at the other end |
| `measurement` | how times are taken, and on which machine |
| `report`, `picture` | tables, sentences and PNGs |
| `sampler`, `decode` | the two commands; `run.py` of each has its request, run and report |
"""

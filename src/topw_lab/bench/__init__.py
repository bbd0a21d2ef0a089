"""`topw bench`: time sampling and decoding, and compare with other libraries (docs/guide/benchmarking.md).

- `sides`: the rows of a table, and which of them can run here
- `process`, `workers`: one process for each environment, which runs the sides of that environment
- `measurement`, `report`, `picture`: times, tables and bar charts of all commands
- `sampler`, `decode`, `rules`, `serve`: one folder per command
"""

"""`topw bench`: time sampling and decoding, and compare with other libraries (docs/guide/benchmarking.md).

- `decode`, `rules`, `sampler`, `serve`: one file per command says what is measured
- `base`: sides in processes of their own, rounds, and the report
- `peers`: the worker of other libraries
"""

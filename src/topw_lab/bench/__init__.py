"""`topw bench`: time sampling and decoding, and compare with other libraries (docs/guide/benchmarking.md).

- `decode`, `rules`, `sampler`, `serve`: one file per command says what is measured; `samplers` and `serve_worker` are
  the workers of the last two
- `sides`, `measure`: sides in processes of their own, rounds, and the report
- `argmax`: the exported decoder with ArgMax; `genai`, `generate`: workers for other libraries
"""

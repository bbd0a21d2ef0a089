"""`topw bench`: time sampling and decoding, and compare with other libraries (docs/guide/benchmarking.md).

- `decode`, `rules`, `sampler`, `serve`: one file per command says what is measured; `samplers` has the
  samplers
- `sides`, `measure`: sides in processes of their own, rounds, and the report
- `genai`, `generate`: workers for other libraries
"""

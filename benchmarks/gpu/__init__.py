"""Checks and measurements on an NVIDIA GPU: `python3 -m benchmarks.gpu` (docs/lab/gpu.md).

- `job`: the interface of parts
- `runner`, `children`, `worker`: parent and child processes
- `build`, `check`, `sanitize`, `capture`, `speed`, `models`, `engines`: parts
- `agreement`, `shipped_rows`: for `check` and `capture`
- `small_rows`, `sanitizer_stand_in`: for `sanitize`
- `measure`, `certified`, `open_rows`, `decoder`, `flashinfer_samplers`: for `speed`
"""

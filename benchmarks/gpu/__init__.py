"""Checks and measurements on an NVIDIA GPU: `python3 -m benchmarks.gpu` (docs/lab/gpu.md).

- `job`: the interface of parts
- `runner`, `children`, `worker`: the parent process, its handle on a child, the child's program
- `record`, `machine`: results, machine
- `build`, `check`, `sanitize`, `capture`, `speed`: parts
- `device`, `tables`, `graphs`, `sizes`: kernels and tables in device memory, CUDA graphs, problem sizes
- `agreement`, `shipped_rows`: comparisons for `check` and `capture`
- `small_rows`, `sanitizer_stand_in`: for `sanitize`, the program under test and the tool's double
- `measure`, `certified`, `open_rows`, `decoder`, `flashinfer_samplers`: for `speed`, timing and the sides
"""

"""Checks and measurements on an NVIDIA GPU, in one command: `python3 -m benchmarks.gpu` (docs/lab/gpu.md).

| module | what it holds |
|---|---|
| `job` | the interface of parts: their steps, a step's input and result |
| `runner`, `children`, `worker` | the parent process, its view of a child, the child's program |
| `record`, `machine` | the two files of results; the machine |
| `build`, `check`, `sanitize`, `capture`, `speed` | parts: their steps and verdicts |
| `device`, `tables`, `graphs`, `sizes` | kernels and tables in device memory, CUDA graphs, problem sizes |
| `agreement`, `shipped_rows` | of `check` and `capture`: comparisons with other launches and with the reference |
| `small_rows`, `sanitizer_stand_in` | of `sanitize`: the program under test; the tool's double in a rehearsal |
| `measure`, `certified`, `open_rows`, `decoder`, `flashinfer_samplers` | of `speed`: timing; the measured sides |
"""

"""Everything that needs an NVIDIA GPU, behind one command: `python3 -m benchmarks.gpu` (`__main__.py`).

| module | what it holds |
|---|---|
| `job` | the interface of parts: steps, what they are given, what they answer |
| `runner`, `children`, `worker` | the parent process, the children it watches, what runs in them |
| `record`, `machine` | the two files of results; what the machine is |
| `build`, `check`, `sanitize`, `capture`, `speed` | parts: which steps there are, and what their results mean |
| `device`, `tables`, `graphs`, `sizes` | kernels and tables in the GPU's memory, CUDA graphs, how large problems are |
| `agreement`, `shipped_rows` | of `check` and `capture`: rows that must answer the same, or as the reference does |
| `small_rows`, `sanitizer_stand_in` | of `sanitize`: the program that is watched; what watches it in a rehearsal |
| `measure`, `certified`, `open_rows`, `decoder`, `flashinfer_samplers` | of `speed`: rounds; what is measured |
"""

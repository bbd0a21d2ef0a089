"""Everything that needs an NVIDIA GPU, behind one command: `python -m benchmarks.gpu`."""

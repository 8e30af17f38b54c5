"""Benchmarks of the CUDA kernels: `python -m ess.bench.gpu.suite`."""

"""Cases that prove a machine with GPUs right, and measure it; see ``benchmarks/gpu.py``."""

"""Kernels for NVIDIA GPUs, and how they are called."""

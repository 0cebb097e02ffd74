"""Headrace: one exact engine that serves MLX language models over HTTP."""

__version__ = "0.1.0"

"""Differences between model families, as data: one frozen record each, no code."""

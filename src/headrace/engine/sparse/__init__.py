"""Sparse prefill: chooses the important tokens of a prompt by a draft model's attention (SpecPrefill, arXiv
2502.02789)."""

"""Sparse prefill: which tokens of a prompt matter, by a draft model's attention (SpecPrefill, arXiv 2502.02789)."""

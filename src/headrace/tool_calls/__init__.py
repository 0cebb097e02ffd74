"""Tool calls: one record per syntax (`syntaxes.py`), the incremental parsers that these are made of, and quotes."""

"""Tool calls: one record per syntax (`syntaxes.py`), and the incremental parsers that these are made of."""

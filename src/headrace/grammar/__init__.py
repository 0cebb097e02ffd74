"""Structured output: from a JSON schema or a grammar to masks of the tokens allowed next. No MLX arrays."""

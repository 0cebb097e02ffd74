"""What an answer may be, from a JSON schema or a grammar to the tokens that may come next. Knows no arrays of MLX."""

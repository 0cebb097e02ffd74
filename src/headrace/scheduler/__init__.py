"""Plans each step: which request computes how many tokens. Arithmetic on counts; no arrays, no text."""

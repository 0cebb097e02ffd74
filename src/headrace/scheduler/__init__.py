"""Who computes what in the next step: arithmetic on counts, no arrays, no text."""

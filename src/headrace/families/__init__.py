"""What differs between model families, as data: one frozen record each. A family never sees code."""

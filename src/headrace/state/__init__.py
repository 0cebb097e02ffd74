"""What a sequence has computed, and the four operations that may change it."""

"""Guessing tokens ahead, and verifying the guesses without changing what is said."""

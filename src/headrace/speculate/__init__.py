"""Speculative decoding: drafts tokens and verifies them without changing the output."""

"""Measures any OpenAI-compatible server from outside, over HTTP alone."""

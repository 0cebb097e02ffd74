"""Counters and histograms, and their Prometheus text. No clock: times are passed in."""

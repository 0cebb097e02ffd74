"""Mixers of packed steps: attention, gated delta net, any module row by row."""

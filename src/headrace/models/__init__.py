"""Finds and loads models, and adapts mlx-lm's models to packed steps."""

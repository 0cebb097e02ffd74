"""Which model, loaded how: mlx-lm's models with our seams."""

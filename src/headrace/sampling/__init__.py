"""From logits to token ids: each row by its own settings and its own random stream."""

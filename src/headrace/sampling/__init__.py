"""From logits to token ids: each row with its own settings and random stream."""

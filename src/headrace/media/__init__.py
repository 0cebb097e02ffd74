"""Images and videos: where they come from, what is in them, and what of a prompt they become. No MLX."""

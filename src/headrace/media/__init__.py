"""Images and videos: fetching, decoding, patches, placeholders and positions. No MLX."""

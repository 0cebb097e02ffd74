"""Text on both sides of the engine: chat to token ids, token ids to events."""

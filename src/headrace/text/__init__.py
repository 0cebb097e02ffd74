"""Text around the engine: chat to token ids, token ids to events."""

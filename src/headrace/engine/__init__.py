"""The engine: one thread that owns every array, and an async facade to it."""

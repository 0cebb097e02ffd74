"""Values that cross a border between rooms. Standard library only; frozen; no behaviour."""

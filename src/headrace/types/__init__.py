"""Values that cross a border between rooms: frozen dataclasses without behaviour, standard library only."""

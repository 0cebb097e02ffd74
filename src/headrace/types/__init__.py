"""Values that cross a border between rooms: dataclasses that know only their own fields, standard library only."""

"""One request from end to end, without HTTP: the engine sees token ids only, the APIs see events only."""

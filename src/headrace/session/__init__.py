"""One request from end to end, without HTTP: the engine sees token ids only and the APIs see events only."""

"""One file per job of the miniature: each turns a random stream into conversations with known answers."""

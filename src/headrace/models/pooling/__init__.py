"""Models that turn texts into vectors and scores."""

"""Several replicas of the server under Ray Serve, and the choice of the one that answers a request."""

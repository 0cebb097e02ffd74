"""What happened so far, as numbers: counted here, and written for Prometheus here. No clock: times are passed in."""

"""What sequences have computed: their states, immutable records of them, and files of these."""

"""The recipe that makes the bundled miniature model. Nothing in the package imports it."""

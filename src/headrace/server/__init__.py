"""HTTP: routes, access control, streams tied to their connection. No tokens, no arrays."""

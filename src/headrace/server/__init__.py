"""HTTP: routes, who may come in, streams that live and die with their connection. Knows no tokens and no arrays."""

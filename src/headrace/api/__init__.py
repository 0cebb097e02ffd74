"""The dialects: bodies, their translation to a ChatRequest, and events as each of them writes answers."""

"""One set of request bodies, translators to ChatRequest and answer encoders per dialect."""

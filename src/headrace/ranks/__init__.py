"""The processes that share one model, a rank each: how they start, what they tell each other, and how they end."""

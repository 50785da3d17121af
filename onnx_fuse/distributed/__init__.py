"""Many processes that train one model: who they are, what they exchange, how they end."""

"""Training: optimizers, the graph of a step, the Trainer that runs it, epochs over data."""

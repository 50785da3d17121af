"""Low-rank adapters of a model: their files, and how a graph has them beside its weights."""

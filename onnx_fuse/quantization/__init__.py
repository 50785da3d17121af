"""Quantized files: which layers, by which ranges, and at what error against the float model."""

"""Running models: the portable backend (onnxruntime) and the CUDA runtime."""

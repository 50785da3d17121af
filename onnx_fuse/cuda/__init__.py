"""CUDA source, NVRTC, launches in memory, and generated pointwise kernels."""

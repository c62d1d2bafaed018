"""The CUDA backend: kernels in plain Python for `numba.cuda`. Nothing here is imported for arrays in host memory."""

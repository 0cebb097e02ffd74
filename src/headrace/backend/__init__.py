"""Which device, which BLAS, which form of a kernel."""

from headrace.config import built_kernels

# MLX looks where its folder is when it first builds a kernel: said before anything in this room can compute.
built_kernels()

"""Which device, which BLAS, which form of a kernel."""

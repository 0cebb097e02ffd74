"""Benchmarks of steps and kernels on this device, in one process: ours, and mlx-lm's on the same weights."""

from headrace.config_loading import set_up_libraries

# before the libraries are imported, which read these settings then
set_up_libraries()

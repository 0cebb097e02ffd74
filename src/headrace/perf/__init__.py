"""What steps and kernels take on this device, in this process: ours, and mlx-lm's on the same weights."""

"""Turns drawings into pixels: signed distances with soft edges, on the CPU or the GPU."""

import numpy as np
import torch
from torch import Tensor

from training.packing import MAX_SHAPES

COLOR_VALUES = (
    (220, 30, 30),
    (40, 160, 60),
    (40, 80, 220),
    (245, 220, 50),
    (245, 140, 30),
    (140, 60, 180),
    (20, 20, 20),
    (250, 250, 250),
)
GROUND_VALUES = ((250, 250, 250), (150, 150, 150), (200, 222, 238))


def _distances(dx: Tensor, dy: Tensor, radius: Tensor) -> Tensor:
    """Signed distances in pixels of all kinds at once, negative inside: [kinds, F, H, W]."""
    ax, ay = dx.abs(), dy.abs()
    circle = torch.hypot(dx, dy) - radius
    square = torch.maximum(ax, ay) - 0.88 * radius
    triangle = torch.maximum(0.866 * ax - 0.5 * dy - 0.5 * radius, dy - 0.5 * radius)
    arm = radius / 3
    cross = torch.minimum(torch.maximum(ax - radius, ay - arm), torch.maximum(ay - radius, ax - arm))
    # A star's outline between a tip and the next notch is one straight line; all ten are folded onto it.
    fold = 2 * torch.pi / 5
    angle = torch.atan2(dx, -dy)
    angle = (angle - fold * torch.round(angle / fold)).abs()
    reach = torch.hypot(dx, dy)
    notch_x, notch_y = 0.45 * np.cos(np.pi / 5), 0.45 * np.sin(np.pi / 5)
    length = np.hypot(1 - notch_x, notch_y)
    star = (notch_y * (reach * angle.cos() - radius) + (1 - notch_x) * reach * angle.sin()) / length
    return torch.stack([circle, square, triangle, star, cross])


def draw(packed: Tensor, size: tuple[int, int], generator: torch.Generator | None = None) -> Tensor:
    """uint8-valued float pixels [F, 3, H, W] of packed drawings [F, 1 + MAX_SHAPES, 5].

    With a generator colours, edges and brightness vary a little from picture to picture, as in training.
    """
    height, width = size
    device = packed.device
    frames = packed.shape[0]

    def noise(*shape: int) -> Tensor:
        return (
            torch.zeros(shape, device=device)
            if generator is None
            else torch.rand(shape, generator=generator, device=device) * 2 - 1
        )

    y = torch.arange(height, device=device)[None, :, None] + 0.5
    x = torch.arange(width, device=device)[None, None, :] + 0.5
    grounds = torch.tensor(GROUND_VALUES, device=device, dtype=torch.float32)
    colors = torch.tensor(COLOR_VALUES, device=device, dtype=torch.float32)
    softness = 1 + 0.5 * noise(frames, 1, 1)
    tint = noise(frames, MAX_SHAPES, 3) * 18
    canvas = (grounds[packed[:, 0, 0].long()] + noise(frames, 3) * 6)[:, :, None, None].expand(-1, -1, height, width)
    for index in range(MAX_SHAPES):
        kind, color, shape_x, shape_y, radius = packed[:, 1 + index].T
        if (kind < 0).all():
            break
        distances = _distances(
            x - (shape_x * width)[:, None, None],
            y - (shape_y * height)[:, None, None],
            (radius * min(size))[:, None, None],
        )
        distance = distances.gather(0, kind.long().clamp(min=0)[None, :, None, None].expand(1, -1, height, width))[0]
        cover = (0.5 - distance / softness).clamp(0, 1) * (kind >= 0)[:, None, None]
        paint = (colors[color.long()] + tint[:, index])[:, :, None, None]
        canvas = canvas * (1 - cover[:, None]) + paint * cover[:, None]
    return canvas.clamp(0, 255).round()


def normalised(pixels: Tensor) -> Tensor:
    """0…255 to -1…1, as the preprocessor's mean and deviation of 0.5 do."""
    return pixels / 127.5 - 1

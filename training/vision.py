"""The vision tower of Qwen3.5 in PyTorch: patches, axial rope, attention within one frame group, 2 x 2 merger."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

PATCH, MERGE, FRAMES = 16, 2, 2


@dataclass(frozen=True, slots=True)
class VisionShape:
    """Sizes of the tower; `position_side` squared positions are interpolated to each picture's grid."""

    hidden_size: int = 128
    mlp_size: int = 256
    num_layers: int = 2
    num_heads: int = 2
    position_side: int = 8
    out_size: int = 256


def patches_of(frames: Tensor) -> Tensor:
    """Groups of two frames [G, 2, 3, H, W] to patch rows [G, P, 1536], in 2 x 2 merge blocks."""
    groups, _, _, height, width = frames.shape
    rows, columns = height // (PATCH * MERGE), width // (PATCH * MERGE)
    x = frames.reshape(groups, FRAMES, 3, rows, MERGE, PATCH, columns, MERGE, PATCH)
    return x.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(groups, rows * columns * MERGE * MERGE, -1)


def block_coordinates(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Row and column of every patch of a grid [rows, columns], in merge-block order."""
    grid = torch.arange(rows * columns).reshape(rows // MERGE, MERGE, columns // MERGE, MERGE)
    order = grid.permute(0, 2, 1, 3).flatten()
    return order // columns, order % columns


def interpolated_positions(table: Tensor, side: int, rows: int, columns: int) -> Tensor:
    """The position table [side * side, D] stretched over a grid, corners on corners; [rows * columns, D]."""
    row, column = block_coordinates(rows, columns)
    y = row.to(table.device) * ((side - 1) / max(rows - 1, 1))
    x = column.to(table.device) * ((side - 1) / max(columns - 1, 1))
    top, left = y.floor().long(), x.floor().long()
    bottom, right = (top + 1).clamp(max=side - 1), (left + 1).clamp(max=side - 1)
    down, across = (y - top)[:, None], (x - left)[:, None]
    upper = table[top * side + left] * (1 - across) + table[top * side + right] * across
    lower = table[bottom * side + left] * (1 - across) + table[bottom * side + right] * across
    return upper * (1 - down) + lower * down


class VisionAttention(nn.Module):
    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.qkv = nn.Linear(shape.hidden_size, 3 * shape.hidden_size)
        self.proj = nn.Linear(shape.hidden_size, shape.hidden_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        groups, patches, width = x.shape
        q, k, v = self.qkv(x).reshape(groups, patches, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k = ((y * cos + torch.cat([-y.chunk(2, -1)[1], y.chunk(2, -1)[0]], -1) * sin).to(v.dtype) for y in (q, k))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(groups, patches, width))


class VisionMlp(nn.Module):
    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(shape.hidden_size, shape.mlp_size)
        self.linear_fc2 = nn.Linear(shape.mlp_size, shape.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(F.gelu(self.linear_fc1(x), approximate="tanh"))


class VisionBlock(nn.Module):
    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(shape.hidden_size, eps=1e-6), nn.LayerNorm(shape.hidden_size, eps=1e-6)
        self.attn, self.mlp = VisionAttention(shape), VisionMlp(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class PatchEmbedding(nn.Module):
    """A convolution whose kernel is one patch, applied as a matrix."""

    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.proj = nn.Conv3d(3, shape.hidden_size, (FRAMES, PATCH, PATCH), stride=(FRAMES, PATCH, PATCH))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.proj.weight.flatten(1), self.proj.bias)


class Merger(nn.Module):
    """Four neighbouring patches to one token; exact GELU."""

    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        joined = shape.hidden_size * MERGE * MERGE
        self.norm = nn.LayerNorm(shape.hidden_size, eps=1e-6)
        self.linear_fc1 = nn.Linear(joined, joined)
        self.linear_fc2 = nn.Linear(joined, shape.out_size)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x).reshape(x.shape[0], -1, self.linear_fc1.in_features)
        return self.linear_fc2(F.gelu(self.linear_fc1(x)))


class VisionTower(nn.Module):
    """`model.visual`."""

    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.shape = shape
        self.patch_embed = PatchEmbedding(shape)
        self.pos_embed = nn.Embedding(shape.position_side**2, shape.hidden_size)
        self.blocks = nn.ModuleList(VisionBlock(shape) for _ in range(shape.num_layers))
        self.merger = Merger(shape)

    def rope(self, rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin [P, head size]: a quarter of the frequencies each for row and column, doubled."""
        quarter = self.shape.hidden_size // self.shape.num_heads // 4
        frequencies = 10_000.0 ** (-torch.arange(quarter) / quarter)
        row, column = block_coordinates(rows, columns)
        angles = torch.cat([row[:, None] * frequencies, column[:, None] * frequencies], -1).repeat(1, 2).to(device)
        return angles.cos(), angles.sin()

    def forward(self, patches: Tensor, size: tuple[int, int]) -> Tensor:
        """Features [G * P / 4, out] of patch rows [G, P, 1536] whose pictures are `size` [height, width] pixels."""
        rows, columns = size[0] // PATCH, size[1] // PATCH
        positions = interpolated_positions(self.pos_embed.weight, self.shape.position_side, rows, columns)
        x = self.patch_embed(patches) + positions
        cos, sin = self.rope(rows, columns, patches.device)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.merger(x).flatten(0, 1)

"""The Qwen3.5 architecture in PyTorch, over token rows laid end to end; parameter names are the releases' names."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from training.gdn import causal_convolution, chunk_inputs, scan
from training.vision import VisionShape, VisionTower


@dataclass(frozen=True, slots=True)
class TextShape:
    """Sizes of the language model; the last of every `attention_interval` layers is full attention."""

    vocabulary_size: int = 4096
    hidden_size: int = 256
    mlp_size: int = 352
    num_layers: int = 8
    attention_interval: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 64
    num_key_heads: int = 1
    num_value_heads: int = 2
    linear_head_size: int = 128
    rope_theta: float = 10_000_000.0
    rope_share: float = 0.25
    rope_sections: tuple[int, int, int] = (3, 3, 2)
    num_mtp_layers: int = 1


MINIATURE = TextShape()
DRAFT = TextShape(
    hidden_size=128,
    mlp_size=256,
    num_layers=4,
    attention_interval=2,
    num_heads=2,
    num_kv_heads=1,
    num_value_heads=1,
    num_mtp_layers=0,
)
MINIATURE_VISION = VisionShape(out_size=256)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the flattened tokens stand: rows x length, each token's index in its row, and the rope's cos and sin."""

    num_rows: int
    length: int
    offset: Tensor
    cos: Tensor
    sin: Tensor


def rope_tables(positions: Tensor, shape: TextShape) -> tuple[Tensor, Tensor]:
    """cos and sin [N, rotary size] of M-RoPE positions [3, N], the axes interleaved over the frequencies."""
    size = int(shape.head_size * shape.rope_share)
    index = torch.arange(size // 2, device=positions.device)
    frequencies = shape.rope_theta ** (-2.0 * index / size)
    axis = torch.zeros_like(index)
    for which in (1, 2):
        axis = torch.where((index % 3 == which) & (index < 3 * shape.rope_sections[which]), which, axis)
    angles = positions.float()[axis].T * frequencies
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def layout_of(positions: Tensor, num_rows: int, shape: TextShape) -> Layout:
    """Layout of `num_rows` equal rows whose positions [3, N] are given."""
    length = positions.shape[1] // num_rows
    offset = torch.arange(length, device=positions.device).repeat(num_rows)
    return Layout(num_rows, length, offset, *rope_tables(positions, shape))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first part of every head; x: [N, heads, size]."""
    size = cos.shape[-1]
    turned, kept = x[..., :size], x[..., size:]
    first, second = turned.chunk(2, -1)
    turned = turned * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]
    return torch.cat([turned.to(x.dtype), kept], -1)


class ZeroCentredNorm(nn.Module):
    """RMSNorm whose stored weight is the difference from one."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + self.weight)).to(x.dtype)


class HeadNorm(nn.Module):
    """The gated norm of a GatedDelta head: plain weight, then silu of the gate."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        return (wide * F.silu(gate.float())).to(x.dtype)


class GatedDelta(nn.Module):
    """The linear-attention mixer."""

    def __init__(self, shape: TextShape) -> None:
        super().__init__()
        self.shape = shape
        key_size = shape.num_key_heads * shape.linear_head_size
        value_size = shape.num_value_heads * shape.linear_head_size
        self.in_proj_qkv = nn.Linear(shape.hidden_size, 2 * key_size + value_size, bias=False)
        self.in_proj_z = nn.Linear(shape.hidden_size, value_size, bias=False)
        self.in_proj_b = nn.Linear(shape.hidden_size, shape.num_value_heads, bias=False)
        self.in_proj_a = nn.Linear(shape.hidden_size, shape.num_value_heads, bias=False)
        self.conv1d = nn.Conv1d(
            2 * key_size + value_size, 2 * key_size + value_size, 4, groups=2 * key_size + value_size, bias=False
        )
        self.A_log = nn.Parameter(torch.empty(shape.num_value_heads).uniform_(1, 8).log())
        step = torch.exp(torch.empty(shape.num_value_heads).uniform_(-6.9, -2.3))
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))
        self.norm = HeadNorm(shape.linear_head_size)
        self.out_proj = nn.Linear(value_size, shape.hidden_size, bias=False)

    def prepare(self, x: Tensor, offset: Tensor) -> tuple[Tensor, ...]:
        """Everything before the scan: `chunk_inputs`' parts and the gate z."""
        shape, size = self.shape, self.shape.linear_head_size
        mixed = causal_convolution(self.in_proj_qkv(x), self.conv1d.weight, offset)
        key_size = shape.num_key_heads * size
        q, k, v = mixed.split([key_size, key_size, mixed.shape[-1] - 2 * key_size], -1)
        q, k = (self._unit(y.reshape(-1, shape.num_key_heads, size)) for y in (q, k))
        v = v.reshape(-1, shape.num_value_heads, size)
        beta = self.in_proj_b(x).float().sigmoid()
        log_decay = -self.A_log.float().exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        return (*chunk_inputs(q * size**-0.5, k, v, log_decay, beta), self.in_proj_z(x))

    @staticmethod
    def _unit(x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + 1e-6)).to(x.dtype)

    def finish(self, out: Tensor, z: Tensor) -> Tensor:
        return self.out_proj(self.norm(out, z.reshape(out.shape)).flatten(1))


class Attention(nn.Module):
    """Full attention with per-head norms, partial rope and an output gate inside q_proj."""

    def __init__(self, shape: TextShape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.hidden_size, 2 * shape.num_heads * shape.head_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, shape.num_kv_heads * shape.head_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, shape.num_kv_heads * shape.head_size, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_size, shape.hidden_size, bias=False)
        self.q_norm = ZeroCentredNorm(shape.head_size)
        self.k_norm = ZeroCentredNorm(shape.head_size)

    def prepare(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys, values [N, heads, size] and the gate [N, heads * size]."""
        size = self.shape.head_size
        q, gate = self.q_proj(x).reshape(-1, self.shape.num_heads, 2 * size).chunk(2, -1)
        k = self.k_norm(self.k_proj(x).reshape(-1, self.shape.num_kv_heads, size))
        v = self.v_proj(x).reshape(-1, self.shape.num_kv_heads, size)
        return rotate(self.q_norm(q), cos, sin), rotate(k, cos, sin), v, gate.flatten(1)

    def finish(self, out: Tensor, gate: Tensor) -> Tensor:
        return self.o_proj(out * gate.sigmoid())


def attend(q: Tensor, k: Tensor, v: Tensor, num_rows: int) -> Tensor:
    """Causal attention within rows; returns [N, heads * size]."""
    q, k, v = (x.reshape(num_rows, -1, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2).flatten(0, 1)


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: TextShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.mlp_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.mlp_size, bias=False)
        self.down_proj = nn.Linear(shape.mlp_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One decoder layer. `enter` and `leave` see flattened tokens only, so each compiles once for all row lengths."""

    def __init__(self, shape: TextShape, recurrent: bool) -> None:
        super().__init__()
        self.recurrent = recurrent
        if recurrent:
            self.linear_attn = GatedDelta(shape)
        else:
            self.self_attn = Attention(shape)
        self.input_layernorm = ZeroCentredNorm(shape.hidden_size)
        self.post_attention_layernorm = ZeroCentredNorm(shape.hidden_size)
        self.mlp = Mlp(shape)

    def enter(self, x: Tensor, offset: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        x = self.input_layernorm(x)
        return self.linear_attn.prepare(x, offset) if self.recurrent else self.self_attn.prepare(x, cos, sin)

    def leave(self, x: Tensor, mixed: Tensor, gate: Tensor) -> Tensor:
        mixer = self.linear_attn if self.recurrent else self.self_attn
        x = x + mixer.finish(mixed, gate)
        return x + self.mlp(self.post_attention_layernorm(x))

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        *parts, gate = ENTER(self, x, layout.offset, layout.cos, layout.sin)
        if self.recurrent:
            mixed = scan(tuple(parts), layout.num_rows)
        else:
            mixed = attend(parts[0], parts[1], parts[2], layout.num_rows)
        return LEAVE(self, x, mixed, gate)


ENTER, LEAVE = Layer.enter, Layer.leave


def compile_layers() -> None:
    """Compiles the layers' two halves, once for all layers and models of one shape."""
    global ENTER, LEAVE
    torch._dynamo.config.cache_size_limit = 64
    ENTER, LEAVE = torch.compile(Layer.enter, dynamic=False), torch.compile(Layer.leave, dynamic=False)


class Trunk(nn.Module):
    """`model.language_model`: embeddings, layers, final norm."""

    def __init__(self, shape: TextShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary_size, shape.hidden_size)
        self.layers = nn.ModuleList(
            Layer(shape, (index + 1) % shape.attention_interval != 0) for index in range(shape.num_layers)
        )
        self.norm = ZeroCentredNorm(shape.hidden_size)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        for layer in self.layers:
            x = layer(x, layout)
        return self.norm(x)


class MtpHead(nn.Module):
    """`mtp`: from the trunk's post-norm hidden of token t and the embedding of t + 1 to the hidden that says t + 2."""

    def __init__(self, shape: TextShape) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=False)
        self.pre_fc_norm_embedding = ZeroCentredNorm(shape.hidden_size)
        self.pre_fc_norm_hidden = ZeroCentredNorm(shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape, recurrent=False) for _ in range(shape.num_mtp_layers))
        self.norm = ZeroCentredNorm(shape.hidden_size)

    def _enter(self, hidden: Tensor, next_embedding: Tensor, layout: Layout) -> tuple[Tensor, ...]:
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(next_embedding), self.pre_fc_norm_hidden(hidden)], -1))
        return (x, *ENTER(self.layers[0], x, layout.offset, layout.cos, layout.sin))

    def fold(self, hidden: Tensor, next_embedding: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
        """One draft per token at the token's own position; also the keys and values that later drafts see."""
        x, q, k, v, gate = self._enter(hidden, next_embedding, layout)
        return self.norm(LEAVE(self.layers[0], x, attend(q, k, v, layout.num_rows), gate)), k, v

    def chain(self, hidden: Tensor, next_embedding: Tensor, layout: Layout, keys: Tensor, values: Tensor) -> Tensor:
        """The second draft: from the first one's hidden, seeing the folded tokens up to its own and itself.

        `layout` holds positions one further than in `fold`.
        """
        x, q, k, v, gate = self._enter(hidden, next_embedding, layout)
        rows = [y.reshape(layout.num_rows, -1, *y.shape[1:]).transpose(1, 2) for y in (q, keys, values, k, v)]
        query, repeats = rows[0], rows[0].shape[1] // rows[1].shape[1]
        old_keys, old_values, own_keys, own_values = (y.repeat_interleave(repeats, 1) for y in rows[1:])
        eye = torch.eye(layout.length, dtype=torch.bool, device=x.device)
        seen = torch.cat([torch.ones_like(eye).tril(), eye], -1)
        out = F.scaled_dot_product_attention(
            query, torch.cat([old_keys, own_keys], 2), torch.cat([old_values, own_values], 2), attn_mask=seen
        )
        return self.norm(LEAVE(self.layers[0], x, out.transpose(1, 2).flatten(2).flatten(0, 1), gate))

    def extend(
        self, hidden: Tensor, next_embedding: Tensor, layout: Layout, keys: Tensor, values: Tensor, num_folded: Tensor
    ) -> Tensor:
        """`chain` for one token of each row [R, hidden], which sees the first `num_folded` [R] tokens of its row."""
        x, q, k, v, gate = self._enter(hidden, next_embedding, layout)
        keys, values = (
            torch.cat([old.reshape(len(x), -1, *own.shape[1:]), own[:, None]], 1)
            .transpose(1, 2)
            .repeat_interleave(q.shape[1] // own.shape[1], 1)
            for old, own in ((keys, k), (values, v))
        )
        index = torch.arange(keys.shape[2], device=x.device)
        seen = (index < num_folded[:, None]) | (index == keys.shape[2] - 1)
        out = F.scaled_dot_product_attention(q[:, :, None], keys, values, attn_mask=seen[:, None, None])
        return self.norm(LEAVE(self.layers[0], x, out.flatten(1), gate))


class Backbone(nn.Module):
    """`model`: the language model and, if it sees, the vision tower."""

    def __init__(self, shape: TextShape, vision: VisionShape | None) -> None:
        super().__init__()
        self.language_model = Trunk(shape)
        if vision is not None:
            self.visual = VisionTower(vision)


class Miniature(nn.Module):
    """The whole checkpoint; the output head is the embedding table."""

    def __init__(self, shape: TextShape = MINIATURE, vision: VisionShape | None = MINIATURE_VISION) -> None:
        super().__init__()
        self.shape = shape
        self.model = Backbone(shape, vision)
        if shape.num_mtp_layers:
            self.mtp = MtpHead(shape)

    def embed(self, ids: Tensor, features: Tensor | None = None, is_pad: Tensor | None = None) -> Tensor:
        """Token embeddings [N, hidden]; media features replace those of the placeholders."""
        x = self.model.language_model.embed_tokens(ids)
        return x if features is None or is_pad is None else x.masked_scatter(is_pad[:, None], features.to(x.dtype))

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.language_model.embed_tokens.weight.to(hidden.dtype)).float()


def initialise(model: nn.Module, seed: int) -> None:
    """Truncated normal weights by fan-in, small embeddings; norms and decays keep their own start."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 or name.endswith("A_log"):
            continue
        fan_in = parameter[0].numel()
        deviation = 0.02 if "embed" in name and "patch" not in name else 0.7 * fan_in**-0.5
        if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight", "linear_fc2.weight")):
            deviation *= 0.35
        with torch.no_grad():
            parameter.copy_(
                torch.nn.init.trunc_normal_(torch.empty(parameter.shape), std=deviation, generator=generator)
            )

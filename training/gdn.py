"""GatedDelta in chunks of 64: the training form of the recurrence S = g S + k beta (v - (g S)^T k)."""

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK = 64


class TriangularInverse(torch.autograd.Function):
    """(I + a)^-1 of strictly lower triangular float32 matrices [..., C, C]."""

    @staticmethod
    def forward(context, a):
        if a.is_cuda:
            from training.kernels import triangular_inverse  # Triton exists on GPU machines only

            inverse = triangular_inverse(a)
        else:
            eye = torch.eye(a.shape[-1], dtype=a.dtype)
            inverse = torch.linalg.solve_triangular(a + eye, eye.expand_as(a), upper=False, unitriangular=True)
        context.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(context, grad):
        (inverse,) = context.saved_tensors
        transposed = inverse.transpose(-1, -2)
        return -(transposed @ grad @ transposed)


def chunk_inputs(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    """The part that knows no order between chunks.

    q, k: [N, Hk, D], normalised, q scaled; v: [N, Hv, D]; log_decay, beta: [N, Hv] float32; N a multiple of 64.
    Returns a (float32), p, weighted v, weighted k, q, k (all of v's dtype) and the chunks' decay (float32).
    """
    heads, key_heads = v.shape[1], k.shape[1]

    def chunked(x: Tensor) -> Tensor:
        return x.reshape(-1, CHUNK, *x.shape[1:]).transpose(1, 2)

    q, k, v = chunked(q), chunked(k), chunked(v)
    total = chunked(log_decay).cumsum(-1)
    strength = chunked(beta)[..., None]
    causal = torch.tril(torch.ones(CHUNK, CHUNK, device=v.device))
    decay = torch.exp((total[..., :, None] - total[..., None, :]).clamp(max=0.0)) * causal
    similar, scores = k @ k.transpose(-1, -2), q @ k.transpose(-1, -2)
    if heads != key_heads:
        similar, scores, q, k = (x.repeat_interleave(heads // key_heads, 1) for x in (similar, scores, q, k))
    a = strength * decay * similar.float() * torch.tril(causal, -1)
    grown = torch.exp(total)[..., None]
    left = torch.exp(total[..., -1:] - total)[..., None]
    kind = v.dtype
    return (
        a,
        (scores * decay).to(kind),
        (strength * v).to(kind),
        (strength * grown * k).to(kind),
        (q * grown).to(kind),
        (k * left).to(kind),
        torch.exp(total[..., -1]),
    )


def _scan_slowly(w: Tensor, q: Tensor, k: Tensor, p: Tensor, u: Tensor, g: Tensor, num_rows: int) -> Tensor:
    """The loop over chunks in plain operations: for machines without Triton, and in float32."""
    rows = [x.reshape(num_rows, -1, *x.shape[1:]) for x in (w, q, k, p, u, g)]
    w, q, k, p, u, g = rows
    state = torch.zeros(*u.shape[0:1], *u.shape[2:3], u.shape[-1], u.shape[-1], dtype=u.dtype, device=u.device)
    outs = []
    for n in range(u.shape[1]):
        delta = u[:, n] - w[:, n] @ state
        outs.append(q[:, n] @ state + p[:, n] @ delta)
        state = g[:, n, :, None, None] * state + k[:, n].transpose(-1, -2) @ delta
    return torch.stack(outs, 1).flatten(0, 1)


def scan(parts: tuple[Tensor, ...], num_rows: int) -> Tensor:
    """Runs the recurrence over `chunk_inputs`' parts; returns [N, Hv, D]."""
    a, p, weighted_v, weighted_k, q, k, g = parts
    inverse = TriangularInverse.apply(a).to(weighted_v.dtype)
    u, w = inverse @ weighted_v, inverse @ weighted_k
    if u.is_cuda and u.dtype == torch.bfloat16:
        from training.kernels import ChunkScan  # Triton exists on GPU machines only

        out = ChunkScan.apply(w, q, k, p, u, g, num_rows)
    else:
        out = _scan_slowly(w, q, k, p, u, g, num_rows)
    return out.transpose(1, 2).reshape(-1, out.shape[1], out.shape[-1])


def causal_convolution(x: Tensor, weight: Tensor, offset: Tensor) -> Tensor:
    """Depthwise causal convolution and silu over flattened rows.

    x: [N, C]; weight: [C, 1, 4]; offset: [N], the index of each token in its row (earlier rows are not seen).
    """
    width = weight.shape[-1]
    taps = weight[:, 0].to(x.dtype)
    out = x * taps[:, width - 1]
    for shift in range(1, width):
        earlier = F.pad(x, (0, 0, shift, 0))[: x.shape[0]]
        out = out + torch.where(offset[:, None] >= shift, earlier, 0) * taps[:, width - 1 - shift]
    return F.silu(out)

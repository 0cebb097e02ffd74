"""Triton kernels of the chunked GatedDelta form: the triangular inverse and the loop over chunks with its gradient.

All tensors are chunk-major, [chunks of all rows, heads, 64, width]; a row's chunks are neighbours.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

VALUE_BLOCK = 32


@triton.jit
def _inverse(a_pointer, out_pointer, C: tl.constexpr):
    base = tl.program_id(0) * C * C
    row = tl.arange(0, C)
    inverse = tl.where(row[:, None] == row[None, :], 1.0, 0.0)
    for i in range(1, C):
        a_row = tl.load(a_pointer + base + i * C + row)
        update = tl.sum(a_row[:, None] * inverse, 0)
        inverse = tl.where(row[:, None] == i, inverse - update[None, :], inverse)
    tl.store(out_pointer + base + row[:, None] * C + row[None, :], inverse)


@triton.jit
def _scan(
    w_pointer,
    q_pointer,
    k_pointer,
    p_pointer,
    u_pointer,
    g_pointer,
    out_pointer,
    delta_pointer,
    state_pointer,
    num_chunks,
    H: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    BV: tl.constexpr,
):
    row_id = tl.program_id(0) // H
    head = tl.program_id(0) % H
    c = tl.arange(0, C)
    d = tl.arange(0, D)
    v = tl.program_id(1) * BV + tl.arange(0, BV)
    wide = c[:, None] * D + d[None, :]
    narrow = c[:, None] * D + v[None, :]
    square = c[:, None] * C + c[None, :]
    corner = d[:, None] * D + v[None, :]
    state = tl.zeros([D, BV], dtype=tl.float32)
    for n in range(num_chunks):
        at = ((row_id * num_chunks + n) * H + head).to(tl.int64)
        rounded = state.to(u_pointer.dtype.element_ty)
        tl.store(state_pointer + at * D * D + corner, rounded)
        w = tl.load(w_pointer + at * C * D + wide)
        delta = tl.load(u_pointer + at * C * D + narrow).to(tl.float32) - tl.dot(w, rounded)
        delta = delta.to(u_pointer.dtype.element_ty)
        tl.store(delta_pointer + at * C * D + narrow, delta)
        q = tl.load(q_pointer + at * C * D + wide)
        p = tl.load(p_pointer + at * C * C + square)
        out = tl.dot(q, rounded) + tl.dot(p, delta)
        tl.store(out_pointer + at * C * D + narrow, out.to(u_pointer.dtype.element_ty))
        k = tl.load(k_pointer + at * C * D + wide)
        state = state * tl.load(g_pointer + at) + tl.dot(tl.trans(k), delta)


@triton.jit
def _scan_gradient(
    w_pointer,
    q_pointer,
    k_pointer,
    p_pointer,
    g_pointer,
    grad_pointer,
    delta_grad_pointer,
    state_grad_pointer,
    num_chunks,
    H: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    BV: tl.constexpr,
):
    row_id = tl.program_id(0) // H
    head = tl.program_id(0) % H
    c = tl.arange(0, C)
    d = tl.arange(0, D)
    v = tl.program_id(1) * BV + tl.arange(0, BV)
    wide = c[:, None] * D + d[None, :]
    narrow = c[:, None] * D + v[None, :]
    square = c[:, None] * C + c[None, :]
    corner = d[:, None] * D + v[None, :]
    state_grad = tl.zeros([D, BV], dtype=tl.float32)
    for i in range(num_chunks):
        n = num_chunks - 1 - i
        at = ((row_id * num_chunks + n) * H + head).to(tl.int64)
        rounded = state_grad.to(w_pointer.dtype.element_ty)
        tl.store(state_grad_pointer + at * D * D + corner, rounded)
        grad = tl.load(grad_pointer + at * C * D + narrow)
        p = tl.load(p_pointer + at * C * C + square)
        k = tl.load(k_pointer + at * C * D + wide)
        delta_grad = (tl.dot(tl.trans(p), grad) + tl.dot(k, rounded)).to(w_pointer.dtype.element_ty)
        tl.store(delta_grad_pointer + at * C * D + narrow, delta_grad)
        q = tl.load(q_pointer + at * C * D + wide)
        w = tl.load(w_pointer + at * C * D + wide)
        state_grad = state_grad * tl.load(g_pointer + at) + tl.dot(tl.trans(q), grad) - tl.dot(tl.trans(w), delta_grad)


def triangular_inverse(a: Tensor) -> Tensor:
    """(I + a)^-1 for strictly lower triangular float32 a [..., C, C]."""
    a = a.contiguous()
    out = torch.empty_like(a)
    _inverse[(a.numel() // (a.shape[-1] ** 2),)](a, out, C=a.shape[-1], num_warps=4)
    return out


class ChunkScan(torch.autograd.Function):
    """The loop over chunks: delta = u - w S; out = q S + p delta; S = g S + k^T delta, from S = 0 in every row.

    w, q, k, u: [M, H, C, D]; p: [M, H, C, C]; all of one dtype, bf16 in training; g: [M, H] float32.
    Returns out [M, H, C, D].
    """

    @staticmethod
    def forward(context, w, q, k, p, u, g, num_rows):
        w, q, k, p, u, g = (x.contiguous() for x in (w, q, k, p, u, g))
        num_chunks, heads, length, width = w.shape
        out, delta = torch.empty_like(u), torch.empty_like(u)
        state = torch.empty(num_chunks, heads, width, width, dtype=u.dtype, device=u.device)
        grid = (num_rows * heads, width // VALUE_BLOCK)
        _scan[grid](
            w,
            q,
            k,
            p,
            u,
            g,
            out,
            delta,
            state,
            num_chunks // num_rows,
            H=heads,
            C=length,
            D=width,
            BV=VALUE_BLOCK,
            num_warps=4,
            num_stages=2,
        )
        context.save_for_backward(w, q, k, p, g, delta, state)
        context.num_rows = num_rows
        return out

    @staticmethod
    def backward(context, grad):
        w, q, k, p, g, delta, state = context.saved_tensors
        num_chunks, heads, length, width = w.shape
        grad = grad.contiguous()
        delta_grad, state_grad = torch.empty_like(delta), torch.empty_like(state)
        grid = (context.num_rows * heads, width // VALUE_BLOCK)
        _scan_gradient[grid](
            w,
            q,
            k,
            p,
            g,
            grad,
            delta_grad,
            state_grad,
            num_chunks // context.num_rows,
            H=heads,
            C=length,
            D=width,
            BV=VALUE_BLOCK,
            num_warps=4,
            num_stages=2,
        )
        state_t = state.transpose(-1, -2)
        g_grad = (state.float() * state_grad.float()).sum((-1, -2))
        return (
            -delta_grad @ state_t,
            grad @ state_t,
            delta @ state_grad.transpose(-1, -2),
            grad @ delta.transpose(-1, -2),
            delta_grad,
            g_grad,
            None,
        )

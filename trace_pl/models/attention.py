"""One row's attention, in the fastest kernel of torch that takes it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor
from torch.backends.cuda import (
    SDPAParams,
    can_use_cudnn_attention,
    can_use_efficient_attention,
    can_use_flash_attention,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import repeat_kv

_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_CUDNN_TOKENS = 8192
"""Queries from which on cuDNN is allowed. On Hopper, where torch prefers it, it is about twice as
fast as the others, but builds a graph of some ten milliseconds for each new length."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask_QK: Tensor | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Attend causally, or where a mask allows it.

    Args:
        q: (1, H, Q, D).
        k: (1, H_kv, K, D); H is a multiple of H_kv, and each key-value head serves a group.
        v: (1, H_kv, K, D).
        mask_QK: (Q, K) bool, true where a token may look; None is causal.
        dropout: Probability of dropping an attention weight.
        scale: Factor on the scores; None is 1 / sqrt(D).

    Returns:
        (1, H, Q, D).
    """
    with kernels_for(q):
        if not takes_groups(q, k, v, mask_QK, dropout):
            groups = q.shape[1] // k.shape[1]
            k, v = repeat_kv(k, groups), repeat_kv(v, groups)
        return scaled_dot_product_attention(
            q,
            k,
            v,
            mask_QK,
            dropout,
            is_causal=mask_QK is None,
            scale=scale,
            enable_gqa=k.shape[1] != q.shape[1],
        )


def kernels_for(q: Tensor) -> AbstractContextManager[None]:
    """Return a context in which torch chooses among the kernels that suit the queries.

    Importing vLLM turns cuDNN's off for the whole process; here it is on for what it suits.
    """
    if not q.is_cuda:
        return nullcontext()
    has_cudnn = q.shape[2] >= _CUDNN_TOKENS
    kernels: AbstractContextManager[None] = sdpa_kernel(
        [*_KERNELS, SDPBackend.CUDNN_ATTENTION] if has_cudnn else _KERNELS
    )
    return kernels


def takes_groups(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> bool:
    """Return whether a fused kernel reads a key-value head for a whole group of query heads.

    Without one, torch would compute the whole square of scores.
    """
    if not q.is_cuda:
        return True  # the kernel for CPUs does
    asked = SDPAParams(q, k, v, mask, dropout, mask is None, k.shape[1] != q.shape[1])
    return (
        can_use_flash_attention(asked)
        or can_use_cudnn_attention(asked)
        or can_use_efficient_attention(asked)
    )

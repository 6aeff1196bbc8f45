"""Attention of grouped queries, against that of keys and values repeated for each query head."""

from types import SimpleNamespace

import pytest
import torch
from torch.backends import cuda

from trace_pl.models import attention
from trace_pl.models.attention import attend, kernels_for


def given(heads=6, kv_heads=2, queries=40, keys=40, dtype=torch.float32):
    torch.manual_seed(0)
    shapes = ((heads, queries), (kv_heads, keys), (kv_heads, keys))
    return [torch.randn(1, *shape, 16, dtype=dtype, requires_grad=True) for shape in shapes]


def by_hand(q, k, v, mask=None):
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    allowed = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril() if mask is None else mask
    scores = (q @ k.mT / 16**0.5).masked_fill(~allowed, -torch.inf)
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("takes_groups", [True, False])
@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-12)])
def test_every_path_gives_the_outputs_and_gradients_worked_out_by_hand(
    monkeypatch, takes_groups, has_mask, dtype, tolerance
):
    monkeypatch.setattr(attention, "takes_groups", lambda *_: takes_groups)
    tensors = given(keys=70 if has_mask else 40, dtype=dtype)
    mask = torch.rand(40, 70) < 0.5 if has_mask else None
    if mask is not None:
        mask[:, 0] = True
    found, expected = attend(*tensors, mask), by_hand(*tensors, mask)
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    weights = torch.randn_like(expected)
    for one, other in zip(
        torch.autograd.grad((found * weights).sum(), tensors),
        torch.autograd.grad((expected * weights).sum(), tensors),
        strict=True,
    ):
        torch.testing.assert_close(one, other, atol=10 * tolerance, rtol=10 * tolerance)


def test_the_scale_of_a_model_is_used():
    q, k, v = given()
    twice = attend(2 * q, k, v)  # the factor is 1/4 without it
    torch.testing.assert_close(attend(q, k, v, scale=0.5), twice, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("tokens", "expected"), [(8191, False), (8192, True)])
def test_on_a_gpu_long_rows_may_use_cudnn_whatever_vllm_did_to_it(tokens, expected):
    was = cuda.cudnn_sdp_enabled()
    cuda.enable_cudnn_sdp(False)  # as importing vLLM does
    try:
        with kernels_for(SimpleNamespace(is_cuda=True, shape=(1, 4, tokens, 64))):
            assert cuda.cudnn_sdp_enabled() is expected
            assert cuda.flash_sdp_enabled()
            assert cuda.mem_efficient_sdp_enabled()
        assert not cuda.cudnn_sdp_enabled()
    finally:
        cuda.enable_cudnn_sdp(was)


class OnGPU(torch.Tensor):
    """A tensor that says so, which is all that chooses the kernel."""

    is_cuda = True


@pytest.mark.parametrize("fused", ["flash", "cudnn", "efficient", None])
def test_on_a_gpu_heads_are_repeated_unless_torch_has_a_fused_kernel_for_groups(monkeypatch, fused):
    for name in ("flash", "cudnn", "efficient"):
        monkeypatch.setattr(
            attention, f"can_use_{name}_attention", lambda asked, name=name: name == fused
        )
    seen = []

    def kernel(q, k, v, *_, enable_gqa, **__):
        seen.append((k.shape[1], v.shape[1], enable_gqa))
        return q

    monkeypatch.setattr(attention, "scaled_dot_product_attention", kernel)
    attend(*(tensor.detach().as_subclass(OnGPU) for tensor in given()))
    assert seen == [(2, 2, True) if fused else (6, 6, False)]

import pytest
import torch
from random_models import VOCAB, make_llama, make_qwen3, make_qwen3_moe

from trace_pl.models.logprobs import sampled_logprobs
from trace_pl.models.packed_attention import PackedRow

LENGTHS = (9, 1, 23, 4, 17)


def rows():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCAB, (length,), generator=generator) for length in LENGTHS]


def read_packed(model):
    ids = rows()
    return model(
        input_ids=torch.cat(ids)[None],
        position_ids=torch.cat([torch.arange(len(row)) for row in ids])[None],
        packed_rows=[PackedRow(len(row)) for row in ids],
        use_cache=False,
    ).logits[0]


def read_one_by_one(model):
    return torch.cat([model(row[None], use_cache=False).logits[0] for row in rows()])


@pytest.mark.parametrize("make_model", [make_qwen3, make_llama, make_qwen3_moe])
def test_packed_rows_give_the_outputs_and_gradients_of_one_row_at_a_time(make_model):
    found = []
    for read in (read_packed, read_one_by_one):
        model = make_model().double()
        logits = read(model)
        logits.square().mean().backward()
        found.append((logits, {name: p.grad for name, p in model.named_parameters()}))
    (packed, packed_grads), (single, single_grads) = found
    torch.testing.assert_close(packed, single, atol=1e-6, rtol=1e-6)
    assert any(bool(grad.abs().max() > 1e-3) for grad in single_grads.values())
    for name, expected in single_grads.items():
        torch.testing.assert_close(packed_grads[name], expected, atol=1e-6, rtol=1e-6)


def test_without_rows_a_padded_batch_is_masked_as_usual():
    """What ``generate`` and the oracle rely on: padding on either side changes nothing."""
    ids = rows()[0]
    padded = torch.stack([torch.cat([torch.zeros(3, dtype=torch.int64), ids]), rows()[2][:12]])
    mask = torch.ones_like(padded)
    mask[0, :3] = 0
    places = (mask.cumsum(1) - 1).clamp(min=0)
    model = make_qwen3()
    with torch.no_grad():
        found = model(padded, attention_mask=mask, position_ids=places).logits[0, 3:]
        expected = model(ids[None]).logits[0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_generating_with_a_cache_continues_what_was_read():
    model = make_qwen3()
    ids = rows()[2][None]
    with torch.no_grad():
        first = model(ids[:, :10], use_cache=True)
        rest = model(ids[:, 10:], past_key_values=first.past_key_values).logits
        expected = model(ids).logits[:, 10:]
    torch.testing.assert_close(rest, expected, atol=1e-5, rtol=1e-5)


def test_tokens_after_the_last_sampled_one_are_not_read():
    model = make_qwen3()
    read = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    mask = torch.zeros(2, 12, dtype=torch.bool)
    mask[0, 3:6] = True
    ids = torch.stack([rows()[2][:12], rows()[4][:12]])
    logprobs = sampled_logprobs(model, ids, mask)
    # Five tokens predict up to the sixth; a row without any keeps one, for the gradient's sake.
    assert read == [5 + 1]
    with torch.no_grad():
        expected = model(ids[:1]).logits[0].log_softmax(-1)
    for t in range(3, 6):
        torch.testing.assert_close(logprobs[0, t], expected[t - 1, ids[0, t]], atol=1e-5, rtol=1e-5)
    assert torch.count_nonzero(logprobs) == 3

"""What tensors really take, counted while the trainer's own functions run."""

import torch

from trace_pl.commands.plan.live_bytes import LiveBytes
from trace_pl.models.logprobs import sampled_logprobs


def storage_bytes(tensors):
    """Bytes of the different storages behind some tensors."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def rows(vocab, lengths, prompt=8):
    """Token ids and a mask that leaves out the prompt, right-padded."""
    torch.manual_seed(1)
    ids = torch.randint(vocab, (len(lengths), max(lengths)))
    places = torch.arange(max(lengths))
    return ids, (places >= prompt) & (places < torch.tensor(lengths)[:, None])


def saved_bytes(model, ids, mask):
    """Bytes that the forward pass of training keeps for its backward pass, parameters left out."""
    of_model = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = []

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in of_model:
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        sampled_logprobs(model, ids, mask).sum()
    return storage_bytes(kept)


def backward_peak(model, ids, mask):
    """Most bytes alive beside parameters and gradients in a forward and backward pass."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    with LiveBytes() as live:
        sampled_logprobs(model, ids, mask).sum().backward()
    return live.peak

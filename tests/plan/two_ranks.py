"""One rank of a small run under ddp or fully_shard; prints the bytes that this rank holds.

torchrun --nproc-per-node=2 two_ranks.py ddp|sharded CHANGES ROW_LENGTHS
"""

import json
import sys

import torch
from measured_bytes import LiveBytes, rows, storage_bytes
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from wide_models import make_wide

from trace_pl.distributed.sharding import shard_model
from trace_pl.policy import sampled_logprobs


class Policy(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, mask):
        return sampled_logprobs(self.model, ids, mask)


def shard(policy):
    shard_model(policy.model, init_device_mesh("cpu", (2,)), torch.bfloat16)
    return policy


def local(tensors):
    return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]


def main(kind, changes, lengths):
    distributed.init_process_group("gloo")
    model = make_wide(**json.loads(changes))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    ids, mask = rows(model.config.vocab_size, json.loads(lengths))
    live = LiveBytes()
    wrap = DistributedDataParallel if kind == "ddp" else shard
    with live:
        policy = wrap(Policy(model))
        sharing = live.peak  # buckets under ddp, the shards themselves otherwise
        policy(ids, mask).sum().backward()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    optimizer.step()
    live.peak = 0
    with live:
        policy(ids, mask).sum().backward()
    states = [x for state in optimizer.state.values() for x in state.values() if x.numel() > 1]
    found = {
        "weights": storage_bytes(local(parameters)),
        "gradients": storage_bytes(local([p.grad for p in parameters])),
        "optimizer": storage_bytes(local(states)),
    }
    made_before = found["gradients"] + (sharing if kind == "sharded" else 0)
    found["activations and buffers"] = live.peak - made_before
    if distributed.get_rank() == 0:
        print(json.dumps(found))
    distributed.destroy_process_group()


main(*sys.argv[1:])

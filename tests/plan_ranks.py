"""One rank of a small run under ddp, fully_shard or with divided experts; prints what it holds.

A job is a kind (ddp, sharded or experts), changes of the model's config and lengths of rows; what
the first rank found, in bytes, is the last line of its output, one JSON object for each job.
"""

import json

import torch
from measured_bytes import rows, storage_bytes
from processes import leave
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from wide_models import make_wide, make_wide_moe

from trace_pl.commands.plan.live_bytes import LiveBytes
from trace_pl.distributed.sharding import shard_model
from trace_pl.models.logprobs import sampled_logprobs


class Policy(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, mask):
        return sampled_logprobs(self.model, ids, mask)


def shard(policy):
    shard_model(policy.model, init_device_mesh("cpu", (2,)), torch.bfloat16)
    return policy


def shard_experts(policy):
    experts = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "expert"))
    mesh = init_device_mesh("cpu", (2,))
    shard_model(policy.model, mesh, torch.bfloat16, expert_mesh=experts)
    return policy


KINDS = {
    "ddp": (make_wide, DistributedDataParallel),
    "sharded": (make_wide, shard),
    "experts": (make_wide_moe, shard_experts),
}


def local(tensors):
    return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]


def main(jobs):
    """Run the jobs one after the other."""
    distributed.init_process_group("gloo")
    found = [measure(*job) for job in jobs]
    if distributed.get_rank() == 0:
        print(json.dumps(found))
    leave()


def measure(kind, changes, lengths):
    make, wrap = KINDS[kind]
    model = make(**changes)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    ids, mask = rows(model.config.vocab_size, lengths)
    live = LiveBytes()
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
    made_before = found["gradients"] + (0 if kind == "ddp" else sharing)
    found["activations and buffers"] = live.peak - made_before
    return found

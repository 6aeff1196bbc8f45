"""What a plan is made from: plain numbers, free of Lightning and of the config's classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # `trace-pl plan --help` reads this file and needs no torch
    from trace_pl.commands.plan.shapes import ModelShape

GIB = 2**30
ADAMW_8BIT_BYTES = 2 * (1 + 4 / 256)
"""Two moments of a byte for each parameter, and a scale for each block of 256."""


@dataclass(frozen=True)
class Sharding:
    """How the ranks share policy and reference."""

    kind: Literal["single", "ddp", "sharded"] = "single"
    world: int = 1
    """GPUs of the trainer."""
    shard: int = 1
    """GPUs that hold one copy of parameters, gradients and optimizer state between them."""
    expert_parallel: int = 1
    """GPUs that divide the experts of a mixture and exchange tokens."""
    master_bytes: int = 4
    """Bytes of a parameter that the optimizer updates, and of its gradient."""
    param_bytes: int = 4
    """Bytes of a parameter and of an activation in a forward pass."""
    has_buckets: bool = False
    """Whether gradients are copied into buckets to be averaged, as DDP does by default."""
    is_autocast: bool = False
    """Whether parameters are cast on use and the casts kept for the backward pass."""
    reference_on_cpu: bool = False
    gpus_per_node: int = 8

    @property
    def reference_bytes(self) -> int:
        """Bytes of a parameter of the frozen reference."""
        return self.master_bytes if self.is_autocast else self.param_bytes

    @property
    def num_replicas(self) -> int:
        """Copies of the parameters, each on ``shard`` GPUs."""
        return self.world // self.shard


@dataclass(frozen=True)
class Training:
    """How the policy is updated and the reference read."""

    optimizer_bytes: float = 8.0
    """Bytes of optimizer state for each trained parameter."""
    has_checkpointing: bool = False
    """Whether the activations of a layer are computed again in the backward pass."""
    tokens_per_forward: int = 16_384
    scorer_tokens: int = 16_384
    """Tokens of one scoring forward."""
    num_steps: int = 1
    num_passes: int = 1
    has_reference: bool = True
    """Whether a frozen copy beside the policy is read."""
    has_credit: bool = True
    """Whether boundaries are scored."""
    has_kl: bool = False
    """Whether the loss reads the reference for every trained token."""


@dataclass(frozen=True)
class Engine:
    """The engine that samples."""

    param_bytes: int = 2
    kv_cache_gib: float | None = 1.0
    """Memory of keys and values; None where ``share`` rules."""
    share: float = 0.5
    """Share of a GPU's memory for weights and cache together."""
    max_model_len: int = 4096
    max_num_seqs: int = 128
    prefill_tokens: int = 8192
    """Most tokens that one step reads."""
    gpus_of_one: int = 1
    """GPUs that hold one copy of the engine's weights between them."""
    own_gpus: int = 0
    """GPUs that only the engine uses; 0 if it shares those of the trainer."""
    pushes_files: bool = False
    """Whether weights are written to files and read from there."""


@dataclass(frozen=True)
class Workload:
    """The rollouts of one epoch, all ranks together."""

    trajectories: int
    tokens: int
    """Tokens of one trajectory."""
    sampled_tokens: int
    """Tokens of one trajectory that the policy sampled."""
    turns: int
    """Tool turns of one trajectory; there is one boundary more."""
    answer_tokens: int = 16
    """Tokens that a boundary's branches add: header, opening and answer, all aliases together."""

    @property
    def branch_tokens(self) -> int:
        """Tokens that the scorer adds to one trajectory."""
        return (self.turns + 1) * self.answer_tokens


@dataclass(frozen=True)
class Device:
    """One GPU and its links; the defaults are those of an H100 SXM (dense rates, no sparsity)."""

    gpu_memory: float = 80.0
    """Memory of the GPU in GiB."""
    peak_tflops: float = 989.0
    """Peak rate in bfloat16, in 10^12 operations a second."""
    peak_tflops_fp32: float = 67.0
    memory_tb_s: float = 3.35
    link_gb_s: float = 450.0
    """Bandwidth to a GPU of the same node in GB/s, one direction."""
    network_gb_s: float = 50.0
    """Bandwidth to a GPU of another node in GB/s."""
    host_gb_s: float = 25.0
    """Bandwidth to main memory in GB/s."""
    file_gb_s: float = 0.4
    """Weights that are written to a file, read and parsed again, one after the other, in GB/s: what
    `benchmarks/weight_push.py` measured on a local disk; a shared one may be slower."""
    utilisation: float = 0.3
    """Share of the peak that matrix products reach."""
    bandwidth_utilisation: float = 0.5
    """Share of each bandwidth that is reached."""
    reserve_gib: float = 4.0
    """GiB for the CUDA context, communication buffers, CUDA graphs and fragmentation."""


@dataclass(frozen=True)
class Assumptions:
    """What a config does not say. None takes the largest that the config allows."""

    gpus: int | None = None
    """GPUs of the trainer; None takes `trainer.devices` on `trainer.num_nodes`."""
    gpus_per_node: int = 8
    engine_gpus: int | None = None
    """GPUs that only the engine uses; None shares the trainer's where the engine runs in process,
    and takes as many again where it does not."""
    engine_servers: int | None = None
    """Servers that share those GPUs evenly; None takes one for each of `urls`."""
    tokens_per_trajectory: int | None = None
    sampled_tokens: int | None = None
    """Tokens of a trajectory that the policy sampled."""
    turns: int | None = None
    """Tool turns of a trajectory."""
    answer_tokens: int = 16
    """Tokens that a boundary's branches add: header, opening and answer, of all aliases."""


@dataclass(frozen=True)
class PlannedRun:
    """One run as a plan sees it."""

    shape: ModelShape
    sharding: Sharding
    training: Training
    engine: Engine
    work: Workload
    device: Device = Device()

    @property
    def forward_tokens(self) -> int:
        """Tokens of the largest training forward: a longer trajectory goes alone."""
        return max(self.training.tokens_per_forward, self.work.tokens)

    @property
    def predicted_tokens(self) -> int:
        """Tokens of the largest training forward whose log-probs are taken."""
        return self.forward_tokens * self.work.sampled_tokens // self.work.tokens

    @property
    def scored_tokens(self) -> int:
        """Tokens of the largest scoring forward, branches included."""
        return max(self.training.scorer_tokens, self.work.tokens + self.work.branch_tokens)

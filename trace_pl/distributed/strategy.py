"""FSDP2 for policy and reference, through Lightning's strategy for models that shard themselves."""

from __future__ import annotations

import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import PreTrainedModel

from trace_pl.distributed.loading import ModelFiles, load_shards
from trace_pl.distributed.sharding import shard_model
from trace_pl.errors import ConfigError
from trace_pl.files import replace_folder
from trace_pl.models.adapters import LoRA
from trace_pl.models.checkpoint import (
    SafeReader,
    load_sharded,
    read_meta,
    write_meta,
)
from trace_pl.models.loading import model_on_meta, renew_rotary
from trace_pl.models.names import find_model

_SPARE_S = 1800.0
"""Seconds in which a rank samples, trains or saves while others wait, whatever its tools do."""
_TRAINED = StateDictOptions(ignore_frozen_params=True, cpu_offload=True, strict=False)


class ShardedStrategy(ModelParallelStrategy):
    """Shards parameters, gradients and optimizer over all ranks, or over groups of them (HSDP).

    Weights are kept in the module's ``dtype`` (float32: master weights), gathered layer by layer in
    ``compute_dtype``, and their gradients reduced in float32. A checkpoint is a folder to which
    every rank writes its part; it can be resumed with any number of ranks, and one file written by
    a single process can be resumed sharded.

    Args:
        shard_size: Ranks that hold one copy of the model together, as a rule those of one node;
            each such group is a replica. None means all ranks.
        compute_dtype: Number format of the forward and backward pass.
        reference_on_cpu: Keeps the frozen reference in main memory.
        expert_parallel_size: Ranks that divide the experts of a mixture among themselves, as a rule
            those of one node. Each computes its experts for the tokens of all of them, so that
            tokens travel instead of expert weights; a gathered layer is then smaller by as many
            experts. 1 gathers all experts on every rank.
        process_group_backend: None chooses nccl on GPU and gloo on CPU.
        timeout_s: Seconds that a rank waits for the others before the run stops. None allows what
            `data.limits` lets the tools and the reward of one rollout take, and half an hour.
    """

    def __init__(
        self,
        shard_size: int | None = None,
        compute_dtype: Literal["float32", "bfloat16"] = "bfloat16",
        reference_on_cpu: bool = False,
        expert_parallel_size: int = 1,
        process_group_backend: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        super().__init__(
            process_group_backend=process_group_backend,
            timeout=timedelta(seconds=timeout_s or _SPARE_S),
        )
        self.timeout_s = timeout_s
        self.shard_size = shard_size
        self.compute_dtype = getattr(torch, compute_dtype)
        self.reference_on_cpu = reference_on_cpu
        self.expert_parallel_size = expert_parallel_size
        self.expert_mesh: DeviceMesh | None = None

    def setup_environment(self) -> None:
        """Join the process group and lay out replicas and shards."""
        # Lightning's names for the two dimensions; here they are replicas and shards.
        self._data_parallel_size, self._tensor_parallel_size = self.mesh_shape()
        super().setup_environment()
        if self.expert_parallel_size > 1:
            self.expert_mesh = self._divide_for_experts()

    def mesh_shape(self) -> tuple[int, int]:
        """Return the numbers of replicas, and of ranks that share each.

        Raises:
            ConfigError: if other ranks were started, or they cannot be divided into groups of
                ``shard_size``, or these into groups of ``expert_parallel_size``.
        """
        world_size = self.num_nodes * self.num_processes
        self._require_started(world_size)
        size = self.shard_size or world_size
        if size < 1 or world_size % size:
            raise ConfigError(
                f"Expected a number of ranks that trainer.strategy.shard_size ({size}) divides, "
                f"got {world_size} (trainer.devices x trainer.num_nodes). Change one of them."
            )
        experts = self.expert_parallel_size
        if experts < 1 or size % experts:
            raise ConfigError(
                "Expected trainer.strategy.expert_parallel_size to divide the ranks that share one "
                f"copy of the model ({size}), got {experts}."
            )
        return world_size // size, size

    def wait_for(self, slowest_s: float) -> None:
        """Let ranks that are done wait for one that is still busy with a slow rollout.

        Args:
            slowest_s: seconds that tools and reward may take in a rollout that counts.

        Raises:
            ConfigError: if ``timeout_s`` was set to less, so that the ranks would give up.
        """
        if self.timeout_s is None:
            self._timeout = timedelta(seconds=slowest_s + _SPARE_S)
        elif self.timeout_s < slowest_s:
            raise ConfigError(
                f"Expected trainer.strategy.timeout_s of at least {slowest_s:g}, got "
                f"{self.timeout_s:g}: as long may the tools and the reward of a rollout take while "
                "other ranks wait. Raise it, leave it at null, or set data.limits.max_seconds."
            )

    def _require_started(self, world_size: int) -> None:
        """Refuse other ranks than torchrun or Slurm started, which Lightning would not notice."""
        environment = self.cluster_environment
        if environment is None or isinstance(environment, LightningEnvironment):
            return  # Lightning starts the ranks itself
        if environment.world_size() != world_size:
            raise ConfigError(
                f"Expected trainer.devices x trainer.num_nodes of the {environment.world_size()} "
                f"ranks that were started, got {self.num_processes} x {self.num_nodes}. Correct "
                "these settings, or start as many ranks."
            )

    @property
    def mesh(self) -> DeviceMesh:
        """(shards) or (replicas, shards)."""
        mesh = self.device_mesh
        return mesh if mesh.size(0) > 1 else mesh["tensor_parallel"]

    def _divide_for_experts(self) -> DeviceMesh:
        """Return the same ranks as (replicate,) shard and expert; neighbours hold other experts."""
        replicas, size = self.mesh_shape()
        experts = self.expert_parallel_size
        dimensions = {"replicate": replicas, "shard": size // experts, "expert": experts}
        if replicas == 1:
            del dimensions["replicate"]
        return init_device_mesh(
            self.root_device.type, tuple(dimensions.values()), mesh_dim_names=tuple(dimensions)
        )

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Every rank reads other data, also those that share one copy of the model."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def load_policy(self, name: str, dtype: torch.dtype, adapter: LoRA | None) -> PreTrainedModel:
        """Return the policy, each rank holding its part; ``dtype`` is that of the kept weights."""
        model = model_on_meta(name).train()
        if adapter is not None:
            adapter.attach(model)
        return self._load(model, name, dtype, self.compute_dtype, on_cpu=False)

    def load_reference(self, name: str) -> PreTrainedModel:
        """Return the frozen reference, stored in the type it computes in.

        Raises:
            ConfigError: if it is given as a checkpoint.
        """
        if name.endswith(".ckpt"):
            raise ConfigError(
                f"Expected a model as model.reference_name of a sharded run, got '{name}'. Write "
                f"it as one first: trace-pl export {name} FOLDER."
            )
        model = model_on_meta(name).eval().requires_grad_(False)
        dtype = self.compute_dtype
        return self._load(model, name, dtype, dtype, on_cpu=self.reference_on_cpu)

    def _load(
        self,
        model: PreTrainedModel,
        name: str,
        dtype: torch.dtype,
        compute_dtype: torch.dtype,
        on_cpu: bool,
    ) -> PreTrainedModel:
        torch.nn.Module.to(model, dtype)
        shard_model(model, self.mesh, compute_dtype, on_cpu, self.expert_mesh)
        device = torch.device("cpu") if on_cpu else self.root_device
        model.to_empty(device=device)
        renew_rotary(model, self.root_device)
        files = ModelFiles(find_model(name))
        try:
            load_shards(model, files)
        finally:
            files.close()
        return model

    # --- checkpoints ------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return this rank's part of what is trained: all weights, or an adapter alone."""
        assert self.model is not None
        parameters = self.model.named_parameters(remove_duplicate=False)
        trained = {name for name, parameter in parameters if parameter.requires_grad}
        found = get_model_state_dict(self.model, options=_TRAINED)
        return {name: tensor for name, tensor in found.items() if name in trained}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: object = None
    ) -> None:
        """Write a folder, every rank its part; it takes its name when all of it is there."""
        path = Path(self.broadcast(filepath))
        partial = path.with_name(f".{path.name}.partial")
        if self.is_global_zero:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        self.barrier()
        state = {"state_dict": checkpoint.pop("state_dict")}
        for number, optimizer in enumerate(checkpoint.pop("optimizer_states", [])):
            state[f"optimizer_{number}"] = optimizer
        save(state, checkpoint_id=partial)
        if self.is_global_zero:
            write_meta(partial, checkpoint)
            replace_folder(partial, path)
        self.barrier()

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a folder, whatever number of ranks wrote it, or the file of a single process.

        Raises:
            ConfigError: if it is none, or of another model, reference or adapter.
        """
        assert self.lightning_module is not None
        assert self.model is not None
        path = Path(self.broadcast(checkpoint_path))
        saved = read_meta(path)
        self.lightning_module.on_load_checkpoint(saved)  # before its weights are taken for ours
        begins_anew = getattr(self.lightning_module, "restarts_optimizer", False)
        optimizers = [] if begins_anew else self.optimizers
        if path.is_file():
            kept, self.optimizers = self.optimizers, optimizers
            try:
                return super().load_checkpoint(path, weights_only=True)
            finally:
                self.optimizers = kept
        reader = SafeReader(path)
        weights = {"state_dict": self.lightning_module_state_dict()}
        load_sharded(weights, reader)
        set_model_state_dict(self.model, weights["state_dict"], options=_TRAINED)
        for number, optimizer in enumerate(optimizers):
            key = f"optimizer_{number}"
            found = {key: get_optimizer_state_dict(self.model, optimizer, options=_TRAINED)}
            load_sharded(found, reader)
            set_optimizer_state_dict(self.model, optimizer, found[key], options=_TRAINED)
        return saved

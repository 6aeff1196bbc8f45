"""The inputs of a plan, read from the parsed config of a run; nothing of it is built."""

from __future__ import annotations

from dataclasses import asdict, replace
from pkgutil import resolve_name
from typing import Any

import torch
from jsonargparse import ArgumentParser, Namespace

from trace_pl.commands.plan.inputs import (
    ADAMW_8BIT_BYTES,
    GIB,
    Assumptions,
    Device,
    Engine,
    PlannedRun,
    Sharding,
    Training,
    Workload,
)
from trace_pl.commands.plan.memory import kv_bytes_per_token
from trace_pl.commands.plan.shapes import ModelShape, read_shape
from trace_pl.credit.pipeline import reader_of
from trace_pl.engines.protocol import EngineNeeds, RolloutEngine
from trace_pl.errors import ConfigError
from trace_pl.losses import PolicyLoss, TokenClip
from trace_pl.models.adapters import LoRA
from trace_pl.models.loading import has_own_reference
from trace_pl.rollout.trajectory import AgentLimits

_BYTES = {"float32": 4, "bfloat16": 2, "auto": 2}
_COPYING_STRATEGIES = {"auto", "ddp", "ddp_spawn", "DDPStrategy", "SingleDeviceStrategy"}


def run_from_config(
    config: Namespace, assumptions: Assumptions | None = None, device: Device | None = None
) -> PlannedRun:
    """Return what a plan is made from.

    Args:
        config: Config of the subcommand ``fit``, parsed by ``TraceCLI``.
        assumptions: What the config does not say.
        device: The GPU.

    Raises:
        ConfigError: if the model's config is missing, or ranks cannot be divided as asked.
    """
    given = assumptions or Assumptions()
    model = config["model"]
    adapter = model["adapter"] and LoRA(**vars(model["adapter"]))
    shape = read_shape(model["model_name"], adapter)
    sharding = _sharding(config["trainer"], _BYTES[model["dtype"]], given, shape.experts)
    needs = engine_needs(config["data"]["engine"])
    return PlannedRun(
        shape,
        sharding,
        _training(config, sharding),
        _engine(needs, shape, given, sharding.world),
        _workload(config["data"], given),
        device or Device(),
    )


def _sharding(
    trainer: Namespace, dtype_bytes: int, given: Assumptions, num_experts: int
) -> Sharding:
    world = given.gpus or _num_gpus(trainer)
    precision = str(trainer["precision"])
    if precision == "bf16-true":
        dtype_bytes = 2
    is_autocast = precision == "bf16-mixed" and dtype_bytes == 4
    base = Sharding(
        world=world,
        master_bytes=dtype_bytes,
        param_bytes=2 if is_autocast else dtype_bytes,
        is_autocast=is_autocast,
        gpus_per_node=given.gpus_per_node,
    )
    strategy, settings = _name(trainer["strategy"]), _settings(trainer["strategy"])
    if strategy == "ShardedStrategy":
        shard = _shard_size(settings, world)
        return replace(
            base,
            kind="sharded",
            shard=shard,
            expert_parallel=_expert_parallel(settings, shard, num_experts),
            param_bytes=_BYTES[settings["compute_dtype"]],
            is_autocast=False,
            reference_on_cpu=settings["reference_on_cpu"],
        )
    if strategy not in _COPYING_STRATEGIES:
        raise ConfigError(
            f"Expected a strategy of configs/strategy in trainer.strategy, got '{strategy}', whose "
            "memory is not known. Take one of those."
        )
    if world == 1:
        return base
    return replace(base, kind="ddp", has_buckets=not settings.get("gradient_as_bucket_view"))


def _shard_size(settings: dict[str, Any], world: int) -> int:
    """Return the ranks that hold one copy."""
    shard = int(settings["shard_size"] or world)
    if shard < 1 or world % shard:
        raise ConfigError(
            f"Expected trainer.strategy.init_args.shard_size to divide the {world} GPUs, got "
            f"{shard}. Set it to a divisor, or to null for all of them."
        )
    return shard


def _expert_parallel(settings: dict[str, Any], shard: int, num_experts: int) -> int:
    """Return the ranks that divide the experts."""
    size = int(settings["expert_parallel_size"])
    if size == 1 or (size > 1 and shard % size == 0 and num_experts and num_experts % size == 0):
        return size
    raise ConfigError(
        "Expected trainer.strategy.init_args.expert_parallel_size to divide the "
        f"{shard} GPUs that share a copy and the model's {num_experts} experts, got {size}. Set it "
        "to a divisor of both; to 1 for a model without experts."
    )


def _num_gpus(trainer: Namespace) -> int:
    devices, nodes = trainer["devices"], int(trainer["num_nodes"])
    if isinstance(devices, str) and "," in devices:  # numbers of devices, as Lightning reads them
        devices = devices.strip(",").split(",")
    if isinstance(devices, list):
        return len(devices) * nodes
    count = -1 if devices == "auto" else int(devices)
    # "auto" and -1 take what is there
    return (count if count > 0 else max(1, torch.cuda.device_count())) * nodes


def _training(config: Namespace, sharding: Sharding) -> Training:
    model, data, credit = config["model"], config["data"], config["credit"]
    anchor = resolve_name(credit["anchor"]["class_path"])
    reader = reader_of(resolve_name(credit["prober"]["class_path"]), anchor)
    has_kl = build_loss(model["loss"]).needs_reference
    is_read = has_kl or reader == "reference"
    names = model["reference_name"], model["model_name"]
    return Training(
        optimizer_bytes=optimizer_bytes(model["optimizer"], sharding.master_bytes),
        has_checkpointing=model["activation_checkpointing"],
        tokens_per_forward=data["tokens_per_forward"],
        scorer_tokens=credit["assigner"]["tokens_per_forward"],
        num_steps=data["num_steps"],
        num_passes=data["num_passes"],
        has_reference=has_own_reference(is_read, bool(model["adapter"]), *names),
        has_credit=reader != "none",
        has_kl=has_kl,
    )


def build_loss(slot: Namespace | None) -> PolicyLoss:
    """Build the loss, a handful of numbers, to ask what it reads."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--loss", type=PolicyLoss | None)
    made: PolicyLoss | None = parser.instantiate(parser.parse_object({"loss": slot})).loss
    return made or TokenClip()


def optimizer_bytes(optimizer: Namespace, master_bytes: int) -> float:
    """Return the bytes of state for each parameter, from one step on a small parameter.

    Args:
        optimizer: Class path and arguments.
        master_bytes: Bytes of a parameter.
    """
    name = optimizer["class_path"]
    if name.startswith("torchao."):  # compiled for a minute; two moments, a scale for each block
        return 2 * (0.5 + 4 / 128) if "4bit" in name else ADAMW_8BIT_BYTES
    dtype = torch.float32 if master_bytes == 4 else torch.bfloat16
    parameter = torch.nn.Parameter(torch.zeros(64, 64, dtype=dtype))
    parameter.grad = torch.zeros_like(parameter)
    made = resolve_name(name)([parameter], **_settings(optimizer))
    made.step()
    state = made.state[parameter].values()
    tensors = [x for x in state if isinstance(x, torch.Tensor) and x.numel() > 1]
    return sum(x.numel() * x.element_size() for x in tensors) / parameter.numel()


def engine_needs(slot: Any) -> EngineNeeds:  # noqa: ANN401  (a path, or a namespace)
    """Return what the engine of a config says that it takes; nothing of it is built.

    A function that makes an engine says nothing, so it is taken at its settings.
    """
    path = slot if isinstance(slot, str) else slot["class_path"]
    kind = resolve_name(path)
    says = kind if isinstance(kind, type) and issubclass(kind, RolloutEngine) else RolloutEngine
    return says.needs(_settings(slot))


def _engine(needs: EngineNeeds, shape: ModelShape, given: Assumptions, world: int) -> Engine:
    own_gpus = given.engine_gpus
    if own_gpus is None:
        own_gpus = world if needs.has_own_gpus else 0
    servers = given.engine_servers or needs.num_servers
    if own_gpus % servers:
        raise ConfigError(
            f"Expected GPUs of the engine's own that {servers} servers share evenly, got "
            f"{own_gpus}. Change --engine-gpus or --engine-servers."
        )
    made = Engine(
        param_bytes=_BYTES[needs.dtype],
        kv_cache_gib=needs.kv_cache_gib,
        share=needs.gpu_memory_utilization,
        max_model_len=needs.max_model_len,
        max_num_seqs=needs.max_num_seqs,
        prefill_tokens=needs.prefill_tokens,
        gpus_of_one=own_gpus // servers or needs.tensor_parallel_size,
        own_gpus=own_gpus,
        pushes_files=needs.pushes_files,
    )
    if needs.caches_full_length:
        tokens = made.max_num_seqs * made.max_model_len
        return replace(made, kv_cache_gib=tokens * kv_bytes_per_token(shape, made) / GIB)
    return made


def _workload(data: Namespace, given: Assumptions) -> Workload:
    limits = data["limits"] or asdict(AgentLimits())
    tokens = given.tokens_per_trajectory or limits["max_trajectory_tokens"]
    turns = given.turns or limits["max_turns"]
    sampled = given.sampled_tokens or (turns + 1) * limits["max_response_tokens"]
    return Workload(
        trajectories=data["questions_per_epoch"] * data["group_size"],
        tokens=tokens,
        sampled_tokens=min(sampled, tokens),
        turns=turns,
        answer_tokens=given.answer_tokens,
    )


def _name(slot: Any) -> str:  # noqa: ANN401  (a name, or a class path with its arguments)
    path = slot if isinstance(slot, str) else slot["class_path"]
    return str(path).rsplit(".", 1)[-1]


def _settings(slot: Any) -> dict[str, Any]:  # noqa: ANN401
    arguments = None if isinstance(slot, str) else slot.get("init_args")
    return vars(arguments) if arguments else {}

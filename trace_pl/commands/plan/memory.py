"""Memory of one GPU by kind, in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from trace_pl.commands.plan.activations import chunk_rows, exchanged, scoring_pass, training_passes
from trace_pl.commands.plan.inputs import GIB, Engine, PlannedRun
from trace_pl.commands.plan.shapes import ModelShape
from trace_pl.commands.plan.token_bytes import forward_bytes

_SHARE_OF_OWN_GPUS = 0.9
"""What vLLM takes of a GPU unless it is told otherwise."""


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest GPU of the trainer, each kind at its own largest moment."""

    weights: float
    gradients: float
    optimizer: float
    reference: float
    activations: float
    engine_weights: float
    kv_cache: float
    buffers: float
    """Gathered layers, gradients on their way, buckets: what sharing among ranks costs."""
    reserve: float

    @property
    def total(self) -> float:
        """Sum of all kinds."""
        return float(sum(vars(self).values()))

    @property
    def certain(self) -> float:
        """The part that is needed whatever the rollouts' lengths are."""
        return self.total - self.activations - self.reserve


def memory_of(run: PlannedRun) -> Memory:
    """Return the memory of one GPU."""
    shape, sharding, training, engine = run.shape, run.sharding, run.training, run.engine
    reference = shape.base * sharding.reference_bytes / sharding.shard
    on_gpu = training.has_reference and not sharding.reference_on_cpu
    weights, cache = _engine_memory(run)
    is_shared = not engine.own_gpus
    return Memory(
        weights=shape.total * sharding.master_bytes / sharding.shard,
        gradients=shape.trained * sharding.master_bytes / sharding.shard,
        optimizer=shape.trained * training.optimizer_bytes / sharding.shard,
        reference=reference if on_gpu else 0.0,
        activations=activations_of(run),
        engine_weights=weights if is_shared else 0.0,
        kv_cache=cache if is_shared else 0.0,
        buffers=buffers_of(run),
        reserve=run.device.reserve_gib * GIB,
    )


def activations_of(run: PlannedRun) -> float:
    """Return the bytes of the larger of an update's and a scoring forward."""
    shape, b = run.shape, run.sharding.param_bytes
    update = training_passes(
        shape,
        b,
        run.forward_tokens,
        run.predicted_tokens,
        run.training.has_checkpointing,
        run.sharding.is_autocast,
    ).peak
    sent = exchanged(shape, b) if run.sharding.expert_parallel > 1 else 0
    update += run.forward_tokens * sent * (1 if run.training.has_checkpointing else shape.layers)
    if not run.training.has_credit:
        return update
    scoring = scoring_pass(shape, b, run.scored_tokens, run.work.tokens, run.work.branch_tokens)
    return max(update, scoring + run.scored_tokens * 2 * sent)


def buffers_of(run: PlannedRun) -> float:
    """Return the bytes that pass between parameters, gradients and other ranks.

    A gradient is computed beside the sum that it is added to, so the largest tensor counts once
    more; the head's, of several chunks of tokens, is summed up in float32 before. Sharded, the
    layer in use and the next one lie whole in the type of the computation, and what is outside the
    layers from forward to backward. The gradient of a layer, or of one tensor outside, lies whole
    and once more in float32 to be averaged.
    """
    shape, sharding = run.shape, run.sharding
    trains_all = shape.trained > shape.counts.adapter
    if sharding.kind != "sharded":
        has_chunks = run.predicted_tokens > chunk_rows(shape)
        largest = shape.head * (sharding.master_bytes + 4 * has_chunks) if trains_all else 0
        buckets = shape.trained * sharding.master_bytes if sharding.has_buckets else 0
        casts = shape.cast * sharding.param_bytes if sharding.is_autocast else 0
        return largest + buckets + casts
    once, twice = sharding.param_bytes, sharding.param_bytes + 4
    if not trains_all:
        twice = 0
    elsewhere = shape.layer_experts * (1 - 1 / sharding.expert_parallel)
    layers = (shape.largest_layer - elsewhere) * (2 * once + twice)
    return shape.outside_layers * once + max(layers, shape.head * twice)


def kv_bytes_per_token(shape: ModelShape, engine: Engine) -> int:
    """Return the bytes of keys and values of one token in all layers, on one GPU of an engine.

    Heads are divided among the GPUs; where there are more GPUs than heads, each holds one.
    """
    heads = ceil(shape.kv_heads / engine.gpus_of_one)
    return 2 * shape.layers * heads * shape.head_dim * engine.param_bytes


def cached_tokens(run: PlannedRun) -> float:
    """Return how many tokens one engine's cache holds."""
    _, cache = _engine_memory(run)
    return cache / kv_bytes_per_token(run.shape, run.engine)


def cached_sequences(run: PlannedRun) -> float:
    """Return how many sequences of full length one engine's cache holds."""
    return cached_tokens(run) / run.engine.max_model_len


def _engine_memory(run: PlannedRun) -> tuple[float, float]:
    """Return the bytes of weights and of cache on one GPU of the engine."""
    engine = run.engine
    weights = run.shape.base * engine.param_bytes / engine.gpus_of_one
    if engine.kv_cache_gib is not None and not engine.own_gpus:
        return weights, engine.kv_cache_gib * GIB
    share = _SHARE_OF_OWN_GPUS if engine.own_gpus else engine.share
    # vLLM measures its largest forward before it takes the rest for its cache.
    working = engine.prefill_tokens * forward_bytes(run.shape.blueprint, engine.param_bytes)
    return weights, max(0.0, share * run.device.gpu_memory * GIB - weights - working)

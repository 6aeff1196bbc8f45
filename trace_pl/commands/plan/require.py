"""Stopping a run that cannot fit, before it loads anything."""

from __future__ import annotations

import logging

from jsonargparse import Namespace

from trace_pl.commands.plan.from_config import run_from_config
from trace_pl.commands.plan.inputs import GIB, Assumptions, Device
from trace_pl.commands.plan.memory import cached_sequences, memory_of
from trace_pl.commands.plan.remedies import fits
from trace_pl.commands.plan.report import advice, memory_table
from trace_pl.commands.plan.token_bytes import UnknownMemory
from trace_pl.errors import ConfigError

logger = logging.getLogger(__name__)


def require_fit(config: Namespace, gpu_memory: float, gpus: int | None = None) -> None:
    """Stop a run that cannot fit before it loads weights; warn of one that may not.

    Only what does not depend on the lengths of rollouts is held against the memory.

    Args:
        config: Config of the subcommand ``fit``, parsed by ``TraceCLI``.
        gpu_memory: Memory of one GPU in GiB.
        gpus: GPUs of the trainer; None takes those of the config.

    Raises:
        ConfigError: with the plan's table, if it does not fit.
    """
    run = run_from_config(config, Assumptions(gpus), Device(gpu_memory=gpu_memory))
    try:
        memory = memory_of(run)
    except UnknownMemory as error:
        logger.warning("The run starts without a look at its memory. %s", error)
        return
    if memory.certain > gpu_memory * GIB or cached_sequences(run) < 1.0:
        raise ConfigError(
            f"Expected a run within the {gpu_memory:.1f} GiB of a GPU, got one that needs "
            f"{memory.certain / GIB:.1f} GiB before its first token. Change the config as below."
            f"\n\n{memory_table(run)}\n\n{advice(run)}"
        )
    if not fits(run):
        logger.warning(
            "A forward of %d tokens may not fit into the memory of a GPU.\n\n%s\n\n%s",
            run.forward_tokens,
            memory_table(run),
            advice(run),
        )

"""`trace-pl export CHECKPOINT OUTPUT`: from a checkpoint of a run to a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from jsonargparse import auto_cli

from trace_pl.commands.explain import ExplainedParser


def command(arguments: list[str]) -> None:
    """Run `trace-pl export`."""
    auto_cli(
        export,
        args=arguments,
        as_positional=True,
        parser_class=ExplainedParser,
        prog="trace-pl export",
    )


def export(
    checkpoint: Path,
    output: Path,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    adapter_only: bool = False,
    max_shard_size: str = "2GB",
) -> None:
    """Write the policy of a checkpoint as a folder that transformers and vLLM load.

    Args:
        checkpoint: A ``.ckpt`` file, or the folder of a sharded checkpoint.
        output: Folder to make; it must not exist.
        dtype: Number format of the weights; None keeps that of the run, and float32 for an adapter
            that is merged.
        adapter_only: Writes the adapter of a LoRA run in peft's format instead of merging it.
        max_shard_size: Largest file of weights, in KB, MB or GB.
    """
    from trace_pl.training.export import (
        export as write,  # takes seconds, which --help does not need
    )

    write(checkpoint, output, dtype, adapter_only, max_shard_size)

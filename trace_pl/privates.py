"""Private names of other libraries, each with the reason why no public one will do.

They are used from here alone, but for torch's modes of dispatch: commands that answer at once
import this file, which therefore imports no torch, so ``trace_pl.commands.plan.live_bytes`` has
those. What has to be overridden stands where it is overridden: ``LightningCLI._parse_ckpt_path``,
which reads the checkpoint before `last` is known to be one. A test fails by name if an upgrade
removes one of them; the versions that were tried are those of pyproject.toml.
"""

from __future__ import annotations

from argparse import Action
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser
from jsonargparse._typehints import implements_protocol, is_protocol

if TYPE_CHECKING:  # commands that answer at once import this file
    from lightning.pytorch.loggers import CSVLogger, Logger
    from lightning.pytorch.loggers.csv_logs import ExperimentWriter
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.distributed_c10d import Store
    from transformers import PreTrainedConfig

# Whether a class fits a slot is jsonargparse's to say; a second judgement could be another.
__all__ = [
    "actions_of",
    "attention_of",
    "default_store",
    "has_version",
    "hint_of",
    "implements_protocol",
    "is_protocol",
    "local_part",
    "num_bytes",
    "set_version",
    "set_writer",
    "subcommands_of",
]


def actions_of(parser: ArgumentParser) -> list[Action]:
    """Return what a parser takes; argparse has no public list."""
    return list(parser._actions)


def hint_of(action: Action) -> Any:  # noqa: ANN401  (any type hint)
    """Return the type hint that an action checks, None if it checks none; none is public."""
    return getattr(action, "_typehint", None)


def attention_of(config: PreTrainedConfig) -> str:
    """Return the name of a model's attention, which in public is only set."""
    return str(config._attn_implementation)


def subcommands_of(parser: ArgumentParser) -> dict[str, ArgumentParser]:
    """Return the parsers of a parser's commands by name; jsonargparse has no public list."""
    action = parser._subcommands_action
    return {} if action is None else dict(action.choices)


def has_version(logger: Logger) -> bool:
    """Return whether a logger's version was chosen; its public property would choose one."""
    return getattr(logger, "_version") is not None  # noqa: B009  (not a name that mypy knows)


def set_version(logger: Logger, version: int | str) -> None:
    """Give a logger its version; in public only its constructor takes one."""
    setattr(logger, "_version", version)  # noqa: B010


def set_writer(logger: CSVLogger, writer: ExperimentWriter) -> None:
    """Give a CSV logger the writer of its table; in public it makes one over an empty table."""
    logger._experiment = writer


def num_bytes(size: str) -> int:
    """Return 2,000,000,000 for '2GB', as ``save_pretrained`` reads its ``max_shard_size``.

    Raises:
        ValueError: if it is no size.
    """
    from huggingface_hub.serialization._base import parse_size_to_int

    return parse_size_to_int(size)


def local_part(
    shape: Any,  # noqa: ANN401  (torch.Size)
    mesh: DeviceMesh,
    placements: Any,  # noqa: ANN401
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and offset of this rank's part of a tensor; DTensor shows only the part."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    part, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    return tuple(part), tuple(offset)


def default_store() -> Store:
    """Return the store through which ranks met; in public another one would need its own port.

    It is a clone, for a thread that may use it while another waits for the original.
    """
    from torch.distributed.distributed_c10d import _get_default_store

    store: Any = _get_default_store()
    clone: Store = store.clone()  # which torch's own stubs do not know
    return clone

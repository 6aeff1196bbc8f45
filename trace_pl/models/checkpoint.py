"""Reading and writing the checkpoints of runs, without running what a file might hold.

A single process writes one file; a sharded run writes a folder, to which every rank adds its part.
"""

from __future__ import annotations

import pickle
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from trace_pl.errors import CheckpointError, ConfigError, one_line
from trace_pl.files import file_beside

_META = "meta.pt"  # of a folder: everything but tensors; Lightning's name
_EXPECTED = ("model_name", "reference_name", "metrics")


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return what a run saved, the optimizer of a sharded run apart.

    Args:
        path: A ``.ckpt`` file, or the folder of a sharded run. The tensors under "state_dict" stay
            there until they are used.

    Raises:
        ConfigError: if there is none, or it is not one of this project.
    """
    saved = read_meta(path)
    if path.is_dir():
        saved["state_dict"] = ShardedWeights(path)
    return saved


class ShardedWeights(Mapping[str, Tensor]):
    """The weights in a folder of shards; each is read anew when it is asked for.

    Raises:
        ConfigError: if the folder has no index, or later if a shard is missing.
    """

    _prefix = "state_dict."

    def __init__(self, path: Path) -> None:
        self._reader = SafeReader(path)
        self._entries = {
            name.removeprefix(self._prefix): entry
            for name, entry in self._reader.read_metadata().state_dict_metadata.items()
            if name.startswith(self._prefix) and isinstance(entry, TensorStorageMetadata)
        }

    def __getitem__(self, name: str) -> Tensor:
        entry = self._entries[name]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        load_sharded({self._prefix + name: tensor}, self._reader, no_dist=True)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def load_sharded(state: dict[str, Any], reader: SafeReader, no_dist: bool = False) -> None:
    """Fill tensors from a folder of shards; ranks that wrote it need not be those that read.

    Args:
        state: Tensors by name, each rank's parts of them.
        reader: Reader of the folder.
        no_dist: Whether this process reads alone.

    Raises:
        ConfigError: if a shard is missing, or the tensors are others.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as asked for
            load(state, storage_reader=reader, no_dist=no_dist)
    except (CheckpointException, OSError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[-300:]
        raise ConfigError(
            f"Expected all weights in the sharded checkpoint '{reader.path}', got: {reason}"
        ) from error


def read_meta(path: Path) -> dict[str, Any]:
    """Return a file's contents, or those of a folder without its tensors.

    Raises:
        ConfigError: if there is none, or it is not one of this project.
    """
    file = path / _META if path.is_dir() else path
    try:
        saved: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, pickle.UnpicklingError, RuntimeError) as error:
        is_other = file.is_file() and not zipfile.is_zipfile(file)  # which torch calls an old one
        got = "a file that is none" if is_other else one_line(error)
        raise ConfigError(
            f"Expected a checkpoint of a run at '{path}', got: {got}. Give the path of one of a "
            "run's `checkpoints`."
        ) from error
    missing = [name for name in _EXPECTED if name not in saved]
    if missing:
        raise ConfigError(
            f"Expected a checkpoint of trace_pl at '{path}', got one without {missing}. Was it "
            "written by another program, or by an older version?"
        )
    return saved


def require_same(saved: Mapping[str, Any], configured: Mapping[str, Any]) -> None:
    """Refuse to go on from the checkpoint of another run.

    Args:
        saved: Contents of the checkpoint; what it does not hold is not compared.
        configured: Settings of ``model`` by name.

    Raises:
        ConfigError: if a setting is another.
    """
    for name, value in configured.items():
        before = saved.get(name, value)
        if before != value:
            raise ConfigError(
                f"Expected model.{name} {before!r} as in the checkpoint, got {value!r}. Set it to "
                "the first, or start a new run."
            )


def write_meta(folder: Path, saved: dict[str, Any]) -> None:
    """Add everything but tensors to a folder of shards."""
    torch.save(saved, folder / _META)


class CheckpointFiles(TorchCheckpointIO):
    """Writes the checkpoint of a single process straight to disk, and reads it without pickle.

    Lightning's own makes two copies of the checkpoint in memory first, and reads whatever a file
    names unless it is told otherwise.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: object = None
    ) -> None:
        """Write to a temporary name, then rename.

        Raises:
            CheckpointError: if that fails; what was there before is still there.
        """
        try:
            path = Path(path)
            for left in path.parent.glob(f".{path.name}.*"):
                left.unlink()  # gigabytes that a killed process of this run had begun to write
            with file_beside(path, is_durable=True) as file:
                torch.save(checkpoint, file)
        except (OSError, RuntimeError) as error:  # the second is what torch makes of a full disk
            raise CheckpointError(
                f"Expected to write a checkpoint to '{path}', got: {error}. Free some space and go "
                "on from the one before with --ckpt_path last."
            ) from error

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any = "cpu",  # noqa: ANN401  (torch.load takes many kinds)
        weights_only: bool | None = True,
    ) -> dict[str, Any]:
        """Read tensors and plain values; ``weights_only`` is always true.

        Raises:
            ConfigError: if the file is no checkpoint of this project, or one of a sharded run.
        """
        if Path(path).is_dir():
            raise ConfigError(
                f"Expected a file as the checkpoint of a single process, got '{path}', a folder of "
                "a sharded run. Add --config configs/strategy/fsdp.yaml, with one device or more."
            )
        return read_meta(Path(path))


class SafeReader(FileSystemReader):
    """Reads a folder of shards; torch's own reader would unpickle whatever its index names."""

    _index: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index of the folder, which is read once.

        Raises:
            ConfigError: if it is missing, or names anything but tensors and their places.
        """
        if self._index is None:
            try:
                with (Path(self.path) / ".metadata").open("rb") as file:
                    self._index = _IndexUnpickler(file).load()
            except (OSError, pickle.UnpicklingError) as error:
                raise ConfigError(
                    f"Expected a complete sharded checkpoint at '{self.path}', got: {error}"
                ) from error
        assert isinstance(self._index, Metadata)
        if self._index.storage_meta is not None:
            self._index.storage_meta.load_id = self.load_id
        return self._index


class _IndexUnpickler(pickle.Unpickler):
    _modules = ("torch.distributed.checkpoint.", "pathlib")
    _names = frozenset(
        {
            ("torch", "Size"),
            ("torch", "device"),
            ("torch.serialization", "_get_layout"),
            ("collections", "OrderedDict"),
            ("builtins", "set"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401  (pickle's own signature)
        """Return a class of an index."""
        is_plain = (module, name) in self._names
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_plain or is_dtype or module.startswith(self._modules):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"an index that names '{module}.{name}'")

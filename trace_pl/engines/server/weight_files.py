"""Weights on their way to a server, in files that both sides see."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from trace_pl.errors import ConfigError, RolloutError
from trace_pl.models.weights import cast, chunked

_MIB = 2**20
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class WeightFiles:
    """Hands weights over in safetensors files that are removed as soon as they are read.

    Only one file exists at a time, so neither side ever holds a second copy of the model.

    Args:
        folder: seen under the same path by the trainer and every server; None means shared memory
            or the temporary folder, for a server on the same machine.
        file_mib: size of a file in MiB; a larger tensor gets a file of its own.

    Raises:
        ConfigError: if the size is below 1.
    """

    folder: str | None = None
    file_mib: int = 256

    def __post_init__(self) -> None:
        if self.file_mib < 1:
            raise ConfigError(f"Expected transfer.file_mib of at least 1, got {self.file_mib}.")

    def make_folder(self) -> Path:
        """Make a folder of this run alone.

        Raises:
            ConfigError: if that fails.
        """
        try:
            parent = self.folder or _default_folder(self.file_mib * _MIB)
            return Path(tempfile.mkdtemp(prefix="trace_pl-", dir=parent))
        except OSError as error:
            raise ConfigError(
                f"Expected a writable folder as transfer.folder, got: {error}."
            ) from error

    def write(
        self,
        named_tensors: Iterable[tuple[str, Tensor]],
        folder: Path,
        dtype: torch.dtype | None = None,
    ) -> Generator[Path, None, None]:
        """Yield files that together hold the tensors; each is gone when the next is asked for.

        Args:
            named_tensors: what to write.
            folder: folder to write to.
            dtype: number format of the files, which is the server's; None keeps the tensors'.

        Raises:
            RolloutError: if a file cannot be written.
        """
        for number, tensors in enumerate(chunked(cast(named_tensors, dtype), self.file_mib * _MIB)):
            path = folder / f"{number}.safetensors"
            try:
                try:
                    save_file(tensors, path)
                except (OSError, SafetensorError) as error:
                    raise RolloutError(
                        f"Weights could not be written to '{path}': {error}. Set "
                        "`data.engine.init_args.transfer.folder` to a folder with more room."
                    ) from error
                yield path
            finally:
                path.unlink(missing_ok=True)


def _default_folder(file_bytes: int) -> Path:
    """Return shared memory where it has room; a container's often has not."""
    if _SHARED_MEMORY.is_dir() and shutil.disk_usage(_SHARED_MEMORY).free > 4 * file_bytes:
        return _SHARED_MEMORY
    return Path(tempfile.gettempdir())

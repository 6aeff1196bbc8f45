"""Reading each rank's part of the weights, so that no rank ever holds a whole model."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import dot_natural_key

from trace_pl.errors import ConfigError
from trace_pl.privates import local_part

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_EXPERTS = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)$")


class ModelFiles:
    """The safetensors files of a model folder, read slice by slice.

    Args:
        folder: A local folder, or a hub id, which is downloaded first.

    Raises:
        ConfigError: if there are no safetensors files.
    """

    def __init__(self, folder: str) -> None:
        if not Path(folder).is_dir():
            folder = snapshot_download(folder, allow_patterns=["*.safetensors*", "*.json"])
        self.folder = Path(folder)
        self._open = ExitStack()
        self._files: dict[str, Any] = {}
        index = self.folder / _INDEX
        if index.is_file():
            self._places: dict[str, str] = json.loads(index.read_text())["weight_map"]
        elif (self.folder / _SINGLE).is_file():
            self._places = dict.fromkeys(self._file(_SINGLE).keys(), _SINGLE)
        else:
            raise ConfigError(
                f"Expected '{_SINGLE}' or '{_INDEX}' in '{self.folder}', got neither. A sharded "
                "model is read from safetensors; save the model anew with transformers."
            )

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows ``start`` to ``stop`` of a parameter, named as transformers names it.

        Transformers packs all experts of a layer into one parameter, files hold them one by one.

        Raises:
            ConfigError: if the files do not have it.
        """
        experts = _EXPERTS.match(name)
        if name in self._places or experts is None:
            return self._rows(name, start, stop)
        parts = ("gate_proj", "up_proj") if experts[2] == "gate_up_proj" else ("down_proj",)
        return torch.stack(
            [
                torch.cat([self._rows(f"{experts[1]}.{e}.{part}.weight") for part in parts])
                for e in range(start, stop)
            ]
        )

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Yield everything under the names of the files, layer by layer."""
        for name in sorted(self._places, key=dot_natural_key):
            yield name, self._rows(name)

    def close(self) -> None:
        """Close the files."""
        self._open.close()

    def _rows(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        if name not in self._places:
            raise ConfigError(
                f"Expected weights '{name}' in '{self.folder}', got {len(self._places)} others. "
                "Are all of its files there, and is config.json of the same model?"
            )
        rows: Tensor = self._file(self._places[name]).get_slice(name)[start:stop]
        return rows

    def _file(self, name: str) -> Any:  # noqa: ANN401  (safetensors has no type for it)
        if name not in self._files:
            try:
                opened = safe_open(self.folder / name, framework="pt")
            except OSError as error:
                raise ConfigError(
                    f"Expected weights in '{self.folder / name}', got: {error}. Is a shard missing?"
                ) from error
            self._files[name] = self._open.enter_context(opened)
        return self._files[name]


@torch.no_grad()
def load_shards(model: nn.Module, files: ModelFiles) -> None:
    """Fill a model that is sharded by rows, each rank its own rows; an adapter starts at zero.

    Args:
        model: Plain parameters are read whole.
        files: The weights.

    Raises:
        ConfigError: if a parameter is missing or of another shape.
    """
    generator = torch.Generator().manual_seed(torch.initial_seed())
    for name, parameter in model.named_parameters():
        local, start, rows = parameter.data, 0, parameter.shape[0]
        if isinstance(parameter, DTensor):
            local = parameter.to_local()
            shape, offset = local_part(parameter.shape, parameter.device_mesh, parameter.placements)
            start, rows = offset[0], shape[0]
        if ".lora_" in name:
            found = _fresh_adapter(name, parameter.shape, generator)[start : start + rows]
        elif rows:
            found = files.read(name.replace(".base_layer.", "."), start, start + rows)
        else:
            continue  # fewer rows than ranks
        if found.shape != local.shape:
            raise ConfigError(
                f"Expected {tuple(local.shape)} as rows {start} to {start + rows} of '{name}' in "
                f"'{files.folder}', got {tuple(found.shape)}. Is config.json of the same model?"
            )
        local.copy_(found)


def _fresh_adapter(name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Return A with peft's spread or a B of zeros, the same on every rank."""
    full = torch.zeros(shape)
    if ".lora_A." in name:
        nn.init.kaiming_uniform_(full, a=math.sqrt(5), generator=generator)
    return full

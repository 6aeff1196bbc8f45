"""Writing a model folder as transformers would, from weights that come one by one."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file
from transformers import PreTrainedModel

from trace_pl.models.weights import Named, chunked


def write_model(folder: Path, model: PreTrainedModel, named: Named, max_file_bytes: int) -> None:
    """Write config and weights, of which no more than one file is in memory.

    `save_pretrained` takes all weights at once, and copies those of experts to part them.

    Args:
        folder: Folder to write to; it exists.
        model: Gives the config; its weights are not read.
        named: At least one tensor, under the names that the files are to hold.
        max_file_bytes: Largest file of weights; a larger tensor has one to itself.
    """
    sizes: dict[str, int] = {}
    parts: dict[str, Path] = {}
    for number, tensors in enumerate(chunked(named, max_file_bytes)):
        part = folder / f"{number}.part"
        save_file(tensors, part, metadata={"format": "pt"})
        sizes |= {name: tensor.nbytes for name, tensor in tensors.items()}
        parts |= dict.fromkeys(tensors, part)
        model.config.dtype = next(iter(tensors.values())).dtype
        tensors.clear()  # or they would stay until the next file is full
    _name_parts(folder, parts, sum(sizes.values()))
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)


def _name_parts(folder: Path, parts: dict[str, Path], num_bytes: int) -> None:
    """Give files the names that loaders look for, now that their number is known.

    Args:
        folder: Folder of the files.
        parts: The file of each tensor.
        num_bytes: Bytes of all tensors.
    """
    files = list(dict.fromkeys(parts.values()))
    if len(files) == 1:
        files[0].rename(folder / "model.safetensors")
        return
    names = {
        file: f"model-{number:05d}-of-{len(files):05d}.safetensors"
        for number, file in enumerate(files, start=1)
    }
    for file, name in names.items():
        file.rename(folder / name)
    places = {tensor: names[file] for tensor, file in parts.items()}
    index = {"metadata": {"total_size": num_bytes}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))

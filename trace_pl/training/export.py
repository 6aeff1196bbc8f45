"""From a checkpoint of a run to a Hugging Face folder that transformers and vLLM load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from trace_pl.distributed.loading import ModelFiles
from trace_pl.errors import ConfigError, one_line
from trace_pl.files import folder_beside
from trace_pl.models.adapters import LoRA, base_tensors, merged_tensors
from trace_pl.models.checkpoint import read_checkpoint
from trace_pl.models.folder import write_model
from trace_pl.models.loading import load_tokenizer, model_on_meta
from trace_pl.models.names import find_model
from trace_pl.models.weights import Named, cast, checkpoint_tensors, model_tensors
from trace_pl.privates import num_bytes

_PREFIX = "policy."  # of the policy's weights in a checkpoint
_PACKAGES = ("trace-pl", "torch", "lightning", "transformers")


def export(
    checkpoint: Path,
    output: Path,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    adapter_only: bool = False,
    max_shard_size: str = "2GB",
) -> None:
    """Write the policy of a checkpoint as a model folder, all of it or nothing.

    Weights go from the checkpoint's files to those of the folder layer by layer; beside a file of
    weights that is about to be written, two or three layers are in memory.

    Args:
        checkpoint: A ``.ckpt`` file, or the folder of a sharded checkpoint.
        output: Folder to make; it must not exist.
        dtype: Number format of the weights; None keeps that of the run, and float32 for an adapter
            that is merged.
        adapter_only: Writes the adapter of a LoRA run in peft's format instead of merging it.
        max_shard_size: Largest file of weights, in KB, MB or GB.

    Raises:
        ConfigError: if the output exists, or the checkpoint is not one of a policy.
    """
    if output.exists():
        raise ConfigError(
            f"Expected a new folder as --output, got '{output}', which exists. Choose another name."
        )
    max_file_bytes = _num_bytes(max_shard_size)
    saved = read_checkpoint(checkpoint)
    adapter = LoRA(**saved["adapter"]) if saved.get("adapter") else None
    if adapter_only and adapter is None:
        raise ConfigError(
            f"Expected a checkpoint with an adapter for --adapter_only, got '{checkpoint}', whose "
            "run trained all weights. Leave the option out."
        )
    model_name = saved["model_name"]
    model = model_on_meta(model_name)
    with suppress(OSError):  # not every model has one
        model.generation_config = GenerationConfig.from_pretrained(find_model(model_name))
    number_format = None if dtype is None else getattr(torch, dtype)
    with _new_folder(output) as folder:
        state = saved["state_dict"]
        if adapter is not None:
            adapter.attach(model)
            _fill_adapter(model, state, str(checkpoint))
            stored = _base(model, model_name)
        else:
            stored = _trained(model, state, str(checkpoint))
        if adapter_only:
            if number_format is not None:
                model.to(number_format)
            model.save_pretrained(folder)
        else:
            named = checkpoint_tensors(model, merged_tensors(model, stored))
            write_model(folder, model, cast(named, number_format), max_file_bytes)
        load_tokenizer(model_name).save_pretrained(str(folder))
        (folder / "README.md").write_text(model_card(saved, checkpoint), encoding="utf-8")


def model_card(saved: Mapping[str, Any], checkpoint: Path) -> str:
    """Return the words beside the weights: whence they come, how they did, and the run's config."""
    config = checkpoint.parent.parent / "config.yaml"  # where a run leaves it
    lines = [
        "---",
        f"base_model: {saved['model_name']}",
        "library_name: transformers",
        "tags: [trace, reinforcement-learning, agent]",
        "---",
        "",
        f"# A policy trained from {saved['model_name']} with TRACE",
        "",
        f"Turn-level credit (arXiv 2607.13988) from the reference {saved['reference_name']}, after "
        f"{saved['global_step']} updates.",
        "",
        "| metric | at the checkpoint |",
        "| --- | ---: |",
        *(f"| {name} | {value:.4g} |" for name, value in sorted(saved["metrics"].items())),
        "",
        "Versions: " + ", ".join(f"{name} {version(name)}" for name in _PACKAGES) + ".",
    ]
    if config.is_file():
        lines += ["", "```yaml", config.read_text(encoding="utf-8").rstrip(), "```"]
    return "\n".join(lines) + "\n"


def _trained(model: PreTrainedModel, state: Mapping[str, Tensor], source: str) -> Named:
    """Yield the weights of a run that trained all of them, in the order of the model."""
    names = {_PREFIX + name for name in model.state_dict()}
    if names != state.keys():
        name = min(names ^ state.keys())
        raise ConfigError(
            f"Expected the weights of '{model.name_or_path}' in '{source}', got "
            f"{'none named' if name in names else 'also'} '{name}'. Is it still the same model?"
        )
    for name, empty in base_tensors(model):
        tensor = state[_PREFIX + name]
        if tensor.shape != empty.shape:
            raise ConfigError(
                f"Expected {tuple(empty.shape)} as the shape of '{name}' in '{source}', got "
                f"{tuple(tensor.shape)}. Is '{model.name_or_path}' still the same model?"
            )
        yield name, tensor


def _base(model: PreTrainedModel, name: str) -> Named:
    """Yield the weights that an adapted model of a name was loaded with."""
    files = ModelFiles(find_model(name))
    missing = {name for name, _ in base_tensors(model)}
    try:
        for name, tensor in model_tensors(model, files.named()):
            if name in missing:  # files may hold more, such as a head that is tied
                missing.remove(name)
                yield name, tensor.float()
    finally:
        files.close()
    if missing:
        raise ConfigError(
            f"Expected all weights of a model in '{files.folder}', got none named "
            f"'{min(missing)}'. Are all of its files there?"
        )


def _fill_adapter(model: PreTrainedModel, state: Mapping[str, Tensor], source: str) -> None:
    """Give a model that has an adapter the one of a checkpoint."""
    weights = {name.removeprefix(_PREFIX): tensor for name, tensor in state.items()}
    try:
        found = model.load_state_dict(weights, strict=False, assign=True)
    except RuntimeError as error:
        raise ConfigError(
            f"Expected an adapter of '{model.name_or_path}' in '{source}', got: {one_line(error)}"
        ) from error
    missing = [name for name in found.missing_keys if ".lora_" in name]
    if missing or found.unexpected_keys:
        raise ConfigError(
            f"Expected an adapter of '{model.name_or_path}' in '{source}', got other weights: "
            f"{len(missing)} are missing and {len(found.unexpected_keys)} unknown, among them "
            f"'{[*missing, *found.unexpected_keys][0]}'."
        )


def _num_bytes(size: str) -> int:
    """Return 2,000,000,000 for '2GB'."""
    try:
        return num_bytes(size)
    except ValueError as error:
        raise ConfigError(
            f"Expected a size such as '500MB' or '2GB' as --max_shard_size, got '{size}'."
        ) from error


@contextmanager
def _new_folder(output: Path) -> Iterator[Path]:
    """Yield a folder that takes the name ``output`` when the block ends well.

    Raises:
        ConfigError: if it cannot be written.
    """
    try:
        with folder_beside(output) as folder:
            yield folder
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"Expected to write a model folder to '{output}', got: {one_line(error)}. Free some "
            "space or choose another place."
        ) from error

"""From a checkpoint of a run to a Hugging Face folder that transformers and vLLM load."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from jsonargparse import auto_cli
from torch import Tensor
from transformers import PreTrainedModel

from trace_pl.adapters import LoRA, merge_in_place
from trace_pl.checkpoint import read_checkpoint
from trace_pl.errors import ConfigError, one_line
from trace_pl.policy import load_model, load_tokenizer, model_on_meta

_PREFIX = "policy."  # of the policy's weights in a checkpoint
_PACKAGES = ("trace-pl", "torch", "lightning", "transformers")


def export(
    checkpoint: Path,
    output: Path,
    dtype: str | None = None,
    adapter_only: bool = False,
    max_shard_size: str = "5GB",
) -> None:
    """Write the policy of a checkpoint as a model folder, all of it or nothing.

    Weights are mapped from the checkpoint's file and written shard by shard. Only another ``dtype``
    or a merged adapter needs memory for one copy of the model.

    Args:
        checkpoint: A ``.ckpt`` file, or the folder of a sharded checkpoint.
        output: Folder to make; it must not exist.
        dtype: Number format of the weights; None keeps that of the run.
        adapter_only: Writes the adapter of a LoRA run in peft's format instead of merging it.
        max_shard_size: Largest file of weights.

    Raises:
        ConfigError: if the output exists, or the checkpoint is not one of a policy.
    """
    if output.exists():
        raise ConfigError(
            f"Expected a new folder as --output, got '{output}', which exists. Choose another name."
        )
    saved = read_checkpoint(checkpoint)
    model_name = saved["model_name"]
    adapter = LoRA(**saved["adapter"]) if saved.get("adapter") else None
    if adapter_only and adapter is None:
        raise ConfigError(
            f"Expected a checkpoint with an adapter for --adapter_only, got '{checkpoint}', whose "
            "run trained all weights. Leave the option out."
        )
    model = _policy(saved["state_dict"], model_name, adapter, str(checkpoint))
    if adapter is not None and not adapter_only:
        model = merge_in_place(model)
    if dtype is not None:
        model.to(getattr(torch, dtype))
    with _new_folder(output) as folder:
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        load_tokenizer(model_name).save_pretrained(str(folder))
        (folder / "README.md").write_text(model_card(saved, checkpoint), encoding="utf-8")


def command(arguments: list[str]) -> None:
    """Run `trace-pl export CHECKPOINT OUTPUT`."""
    auto_cli(export, args=arguments, as_positional=True)


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


def _policy(
    state: Mapping[str, Tensor], model_name: str, adapter: LoRA | None, source: str
) -> PreTrainedModel:
    """Return the policy with the weights of a checkpoint, which it shares memory with."""
    weights = {name.removeprefix(_PREFIX): tensor for name, tensor in state.items()}
    model = model_on_meta(model_name) if adapter is None else load_model(model_name)
    if adapter is not None:
        adapter.attach(model)
    try:
        found = model.load_state_dict(weights, strict=adapter is None, assign=True)
    except RuntimeError as error:
        raise ConfigError(
            f"Expected the weights of '{model_name}' in '{source}', got: {one_line(error)}"
        ) from error
    if found.unexpected_keys:
        raise ConfigError(
            f"Expected an adapter of '{model_name}' in '{source}', got other weights, the first "
            f"'{found.unexpected_keys[0]}'."
        )
    model.tie_weights()
    return model


@contextmanager
def _new_folder(output: Path) -> Iterator[Path]:
    """Yield a folder that takes the name ``output`` when the block ends well."""
    output.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=output.parent, prefix=f".{output.name}."))
    try:
        yield folder
        folder.chmod(0o755)
        os.rename(folder, output)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise

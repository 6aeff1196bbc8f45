"""What is examined: the engine and the policy of a config, on a model of few layers."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import lightning
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from trace_pl.commands.cli import TraceCLI
from trace_pl.distributed.strategy import ShardedStrategy
from trace_pl.engines.protocol import RolloutEngine
from trace_pl.models.loading import load_model, load_tokenizer
from trace_pl.models.names import find_model
from trace_pl.models.weights import policy_tensors
from trace_pl.training.datamodule import RolloutDataModule
from trace_pl.training.module import TraceModule

CPU_TOKENS = 2048


@dataclass(eq=False)
class Patient:
    """The parts of one run, each made when a check first needs it.

    Args:
        arguments: Those of `trace-pl fit`.
        module: Module of the config; its weights are not loaded.
        data: Data module of the config; only its engine is made.
        trainer: Trainer of the config; it does not run.
        layers: Most layers of the model that is made.
        tokens: Tokens of a forward; None takes the config's, fewer on a CPU.
    """

    arguments: list[str]
    module: TraceModule
    data: RolloutDataModule
    trainer: lightning.Trainer
    layers: int
    tokens: int | None = None
    engine: RolloutEngine | None = None
    version: int = 0
    scratch: tempfile.TemporaryDirectory[str] = field(
        default_factory=lambda: tempfile.TemporaryDirectory(prefix="trace_pl-doctor-")
    )

    @classmethod
    def of_config(cls, arguments: list[str], layers: int, tokens: int | None) -> Patient:
        """Return the patient that `trace-pl fit ARGUMENTS` would train."""
        cli = TraceCLI(
            TraceModule,
            RolloutDataModule,
            run=False,
            args=arguments,
            seed_everything_default=0,
            auto_configure_optimizers=False,
            save_config_callback=None,
        )
        return cls(arguments, cli.model, cli.datamodule, cli.trainer, layers, tokens)

    @cached_property
    def device(self) -> torch.device:
        """The first device of the trainer."""
        return self.trainer.strategy.root_device

    @property
    def is_cpu(self) -> bool:
        """Whether that is a CPU."""
        return self.device.type == "cpu"

    @cached_property
    def dtype(self) -> str:
        """The number format in which the policy computes."""
        strategy = self.trainer.strategy
        if isinstance(strategy, ShardedStrategy):
            return str(strategy.compute_dtype).removeprefix("torch.")
        return self.module.dtype_name

    @cached_property
    def folder(self) -> str:
        """The model as both sides load it: the configured one, or its first layers made anew."""
        config = AutoConfig.from_pretrained(find_model(self.module.model_name))
        text = config.get_text_config()
        if text.num_hidden_layers <= self.layers:
            return find_model(self.module.model_name)
        text.num_hidden_layers = self.layers
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[: self.layers]
        folder = Path(self.scratch.name) / "model"
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
        load_tokenizer(self.module.model_name).save_pretrained(folder)
        return str(folder)

    @cached_property
    def policy(self) -> PreTrainedModel:
        """The trainer's side, on its device."""
        model: PreTrainedModel = load_model(self.folder, self.dtype)
        model.eval()
        torch.nn.Module.to(model, self.device)
        return model

    def ids(self, count: int, seed: int = 0) -> Tensor:
        """Return (count,) int64 random token ids."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(
            self.policy.config.get_text_config().vocab_size, (count,), generator=generator
        )

    def running(self) -> RolloutEngine:
        """Return the engine, which the check of its start made.

        Raises:
            Skipped: if it did not start.
        """
        if self.engine is None:
            raise Skipped("the engine did not start")
        return self.engine

    def push(self) -> int:
        """Push the policy into the engine as a new version; return how many tensors."""
        engine = self.running()
        self.version += 1
        count = 0

        def counted() -> Iterator[tuple[str, Tensor]]:
            nonlocal count
            for named in policy_tensors(self.policy):
                count += 1
                yield named

        engine.push_weights(counted(), version=self.version)
        return count

    def close(self) -> None:
        """End the engine and remove what was written."""
        if self.engine is not None:
            self.engine.close()
        self.scratch.cleanup()


class Skipped(Exception):
    """Why a check says nothing here."""


class Failed(Exception):
    """What a check found, and what to change."""

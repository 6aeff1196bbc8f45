"""Settings of the Trainer that would break the flow of rollouts without a word."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trace_pl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class _Rule:
    name: str
    fits: Callable[[Any], bool]
    expected: str
    instead: str
    commands: tuple[str, ...] = ("fit",)


def _is_whole(value: object) -> bool:
    # An int of 1 means one micro-batch, a float of 1.0 all of them.
    return value is None or (isinstance(value, float) and value == 1.0)


def _is_all(value: object) -> bool:
    # All questions are one batch, so that any whole number above 0 means all of them as well.
    return _is_whole(value) or (isinstance(value, int) and value > 0)


_RULES = (
    _Rule(
        "limit_train_batches",
        _is_whole,
        "1.0",
        "An epoch trains on all rollouts that it collected; set data.questions_per_epoch.",
    ),
    _Rule(
        "overfit_batches",
        lambda value: not value,
        "0",
        "Every epoch collects new rollouts; give data.task few questions to repeat them.",
    ),
    _Rule(
        "reload_dataloaders_every_n_epochs",
        lambda value: value == 1,
        "1",
        "Other values train more than once on the same rollouts; set data.num_passes for that.",
    ),
    _Rule(
        "accumulate_grad_batches",
        lambda value: value == 1,
        "1",
        "It is set for each epoch, from data.tokens_per_forward and data.num_steps.",
    ),
    _Rule(
        "val_check_interval",
        _is_whole,
        "1.0",
        "Rollouts are evaluated between epochs; set trainer.check_val_every_n_epoch.",
    ),
    _Rule(
        "check_val_every_n_epoch",
        lambda value: value is not None and value >= 1,
        "at least 1",
        "Set trainer.limit_val_batches to 0 for a run without evaluation.",
    ),
    _Rule(
        "precision",
        lambda value: value != "16-true",
        "32-true, bf16-mixed or 16-mixed",
        "An optimizer's small numbers are 0 in weights of float16, and the weights soon NaN.",
    ),
    _Rule(
        "limit_val_batches",
        lambda value: value == 0 or _is_all(value),
        "0, 1.0 or a whole number",
        "All questions are one batch; set data.evaluation_questions.",
    ),
    *(
        _Rule(
            f"limit_{batches}_batches",
            _is_all,
            "1.0 or a whole number above 0",
            f"All questions are one batch; set data.{questions}.",
            (command,),
        )
        for command, batches, questions in (
            ("validate", "val", "evaluation_questions"),
            ("test", "test", "test_questions"),
            ("predict", "predict", "test_questions"),
        )
    ),
)


def check_trainer(settings: Mapping[str, Any], command: str) -> None:
    """Refuse settings that cut rollouts into pieces, skip some, or train on them again.

    Args:
        settings: Settings of the Trainer by name; what is missing is not checked.
        command: ``fit``, ``validate``, ``test`` or ``predict``.

    Raises:
        ConfigError: at the first of them, with what to set instead.
    """
    for rule in _RULES:
        if command not in rule.commands or rule.name not in settings:
            continue
        value = settings[rule.name]
        if not rule.fits(value):
            raise ConfigError(
                f"Expected trainer.{rule.name} of {rule.expected}, got {value!r}. {rule.instead}"
            )


def require_first_devices(device_ids: Sequence[int]) -> None:
    """Refuse devices that are not the first ones, which vLLM would take in their place.

    In the trainer's process vLLM computes on the device whose number is the local rank; Lightning
    takes the one that stands there in ``trainer.devices``.

    Args:
        device_ids: ``trainer.device_ids``, by local rank.

    Raises:
        ConfigError: with what to set instead.
    """
    if list(device_ids) != list(range(len(device_ids))):
        listed = ",".join(map(str, device_ids))
        raise ConfigError(
            f"Expected trainer.devices to be the first {len(device_ids)}, got {list(device_ids)}: "
            "the engine counts devices from 0 and would take others. Set CUDA_VISIBLE_DEVICES="
            f"{listed} in the environment and trainer.devices to {len(device_ids)}."
        )

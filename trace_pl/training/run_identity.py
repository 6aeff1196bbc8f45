"""What makes two runs the same experiment, and how the settings of two differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_SECTIONS = ("seed_everything", "credit", "model", "data")
_TRAINER = ("gradient_clip_val", "gradient_clip_algorithm")
"""All of the Trainer that changes what a step learns; where and how long it runs is free."""

_FREE = (
    "credit.assigner.tokens_per_forward",
    "model.activation_checkpointing",
    "model.compile_layers",
    "model.max_bad_steps",
    "data.tokens_per_forward",
    "data.evaluation_questions",
    "data.test_questions",
    "data.task.init_args.validation",
    "data.task.init_args.test",
    "data.task.init_args.index.init_args.folder",
    "data.parity_tolerance",
    "data.limits.tool_timeout_s",
    "data.limits.tool_retries",
    "data.limits.reward_timeout_s",
    "data.limits.reward_retries",
    "data.limits.max_seconds",
    "data.engine",
)
_SAMPLING = tuple(f"data.engine.init_args.{name}" for name in ("temperature", "top_p", "seed"))
"""What counts of an engine: the distribution that it samples from."""

_MOST_NAMED = 4


@dataclass(frozen=True, slots=True)
class Change:
    """A setting that is not what it was."""

    key: str
    before: Any
    after: Any
    is_one_sided: bool = False
    """Whether one of the two knows no such setting at all, as after an update of the program."""

    def __str__(self) -> str:
        """Return the key with both values."""
        key = self.key.removesuffix(".class_path")
        return f"{key} {self.after!r} instead of {self.before!r}"

    @property
    def slot(self) -> str:
        """The key as far as a slot, such as ``credit.anchor``."""
        return ".".join(self.key.split(".")[:2])

    def is_named_by(self, names: Iterable[str]) -> bool:
        """Whether one of the names is this key, or a section above it."""
        return _is_below(self.key, names)


def identity(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that two runs share if they are the same experiment, by dotted key.

    Args:
        config: A parsed config in plain values. Memory, evaluation, the engine's mechanics, and
            of the Trainer all but the clipping of gradients may differ and are left out.
    """
    found = flat({name: config.get(name) for name in _SECTIONS})
    trainer = config.get("trainer") or {}
    found |= {f"trainer.{name}": trainer.get(name) for name in _TRAINER}
    return {
        key: value
        for key, value in found.items()
        if key.startswith(_SAMPLING) or not _is_below(key, _FREE)
    }


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings by dotted key; lists are leaves."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Return what differs between two identities, in the order of ``after``.

    Null and a setting that is not there count as the same. Of another class its name alone is told,
    not the arguments that belong to it.
    """
    keys = dict.fromkeys([*after, *before])
    changed = [
        Change(key, before.get(key), after.get(key), _lacks(before, key) or _lacks(after, key))
        for key in keys
        if before.get(key) != after.get(key)
    ]
    replaced = [c.key.removesuffix("class_path") for c in changed if c.key.endswith(".class_path")]
    arguments = tuple(f"{slot}init_args" for slot in replaced)
    return [change for change in changed if not change.key.startswith(arguments)]


def describe(changes: Sequence[Change]) -> str:
    """Return changes in words, the first few of many."""
    words = "; ".join(map(str, changes[:_MOST_NAMED]))
    more = len(changes) - _MOST_NAMED
    return f"{words}; and {more} more" if more > 0 else words


def _lacks(settings: Mapping[str, Any], key: str) -> bool:
    """Whether there is no such setting; below a null there is one, which was left out."""
    return not any(_is_below(key, [name]) or _is_below(name, [key]) for name in settings)


def _is_below(key: str, names: Iterable[str]) -> bool:
    return any(f"{key}.".startswith(f"{name}.") for name in names)

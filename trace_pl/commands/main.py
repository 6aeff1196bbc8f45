"""Where `trace-pl` starts: the list of commands, answered at once, and the way to each of them."""

from __future__ import annotations

import importlib
import logging
import sys
import warnings
from difflib import get_close_matches

from trace_pl.errors import ConfigError, TraceError, print_error

RUNS = {
    "fit": "train a policy",
    "validate": "evaluate a policy on the validation questions",
    "test": "evaluate a policy on the test questions",
    "predict": "sample rollouts and write them to a file",
}
"""Lightning's commands -> what they do; trace_pl.commands.cli runs them."""

COMMANDS = {
    "plan": (
        "trace_pl.commands.plan",
        "say whether a run fits the GPUs, and how long it takes",
    ),
    "doctor": (
        "trace_pl.commands.doctor",
        "say whether engine, weights and training work on this machine",
    ),
    "export": ("trace_pl.commands.export", "write a checkpoint as a Hugging Face folder"),
    "configs": ("trace_pl.commands.configs", "list the configs that are shipped, or print one"),
    "make-base": ("trace_pl.commands.make_base", "train the built-in tiny model again"),
}
"""Commands beside them -> the module whose ``command`` is given the arguments, what they do."""

EXPECTED_WARNINGS = (
    # The in-process engine opens a process group of one; all our logging syncs across ranks.
    r"It is recommended to use `self\.log\(",
    # The sized iterable keeps Lightning from prefetching a batch of an older policy.
    r"Your `IterableDataset` has `__len__` defined",
    # Minibatches move themselves, evaluation batches stay on the CPU.
    r"You have overridden `transfer_batch_to_device`",
    # A rollout phase is generated in this process; loader workers could not reach the engine.
    r"The '\w+_dataloader' does not have many workers",
    # A resumed run goes on in its folder, an evaluation in another than the checkpoint's.
    r"Checkpoint directory .* exists and is not empty",
    r"The dirpath has changed from",
    # Lightning's own calls of newer torch and jsonargparse.
    r".*isinstance\(treespec, LeafSpec\)",
    r"(?s).*``ArgumentParser\.add_instantiator`` was deprecated",
)


def main() -> int:
    """Run the command line; errors of trace_pl become one line and exit code 2."""
    for message in EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(is_no_advertisement)
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(render_help())
        return 0
    try:
        return run(arguments[0], arguments[1:])
    except TraceError as error:
        print_error(str(error))
        return 2


def run(name: str, arguments: list[str]) -> int:
    """Run one command.

    Raises:
        ConfigError: if there is none of that name.
    """
    if name in COMMANDS:
        module = importlib.import_module(COMMANDS[name][0])
        return int(module.command(arguments) or 0)
    if name not in RUNS:
        known = [*RUNS, *COMMANDS]
        close = [] if name.startswith("-") else get_close_matches(name, known, n=1)
        hint = f"Did you mean `{close[0]}`? " if close else ""
        raise ConfigError(
            f"Expected a command first, got '{name}'. {hint}There are: {', '.join(known)}."
        )
    from trace_pl.commands.cli import run_lightning  # takes seconds; the others need none of it

    run_lightning([name, *arguments])
    return 0


def render_help() -> str:
    """Return the list of commands."""
    words = {**RUNS, **{name: text for name, (_, text) in COMMANDS.items()}}
    return "\n".join(
        [
            "usage: trace-pl COMMAND [arguments]",
            "",
            "TRACE: turn-level credit for tool-using agents.",
            "",
            "commands:",
            *(f"  {name:<10} {text}" for name, text in words.items()),
            "",
            "`trace-pl COMMAND --help` says what a command takes. A first run:",
            "  trace-pl fit --config quickstart",
        ]
    )


def is_no_advertisement(record: logging.LogRecord) -> bool:
    """Whether a line of Lightning's log is more than praise of other packages."""
    return "Tip: For seamless" not in record.getMessage()

"""Every error a user can meet; each says what was expected, what came, and what to change."""

import sys
import traceback


class TraceError(Exception):
    """Base of all errors raised on purpose; the command line prints it as one line."""


class ConfigError(TraceError, ValueError):
    """A setting, a path, a tokenizer or an installation that cannot work."""


class DataError(TraceError, ValueError):
    """A question, a document or a file that breaks its format."""


class CreditError(TraceError, ValueError):
    """Boundaries, values or credit that do not fit their rollout."""


class RolloutError(TraceError, RuntimeError):
    """The engine or the agent loop could not produce usable rollouts."""


class ServerError(RolloutError):
    """A vLLM server that cannot be reached, refuses a request, or does not answer in time."""


class CheckpointError(TraceError, RuntimeError):
    """A checkpoint could not be written; the one before is still there."""


class WeightSyncError(RolloutError):
    """Engine and trainer disagree about the policy after a weight push."""


class NumericalError(TraceError, ArithmeticError):
    """A loss or gradient stayed non-finite for more steps than allowed."""


def one_line(error: BaseException) -> str:
    """Return the beginning of another's error text on one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def with_place(error: BaseException) -> str:
    """Return the kind and the beginning of another's error on one line, and where it was raised."""
    told = type(error).__name__ + (f": {one_line(error)}" if str(error) else "")
    frames = traceback.extract_tb(error.__traceback__)
    return f"{told} in '{frames[-1].filename}', line {frames[-1].lineno}" if frames else told


def print_error(text: str) -> None:
    """Print an error as the command line does."""
    print(f"trace-pl: error: {text}", file=sys.stderr)

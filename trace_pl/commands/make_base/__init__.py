"""`trace-pl make-base`: train the tiny base model of the closed web again."""

from __future__ import annotations

from pathlib import Path

from jsonargparse import auto_cli

from trace_pl.commands.explain import ExplainedParser
from trace_pl.commands.make_base.recipe import BaseRecipe

BASE_FOLDER = Path(__file__).parents[2] / "tasks" / "closed_web" / "base"


def command(arguments: list[str]) -> None:
    """Run `trace-pl make-base`."""
    auto_cli(train_base, args=arguments, parser_class=ExplainedParser, prog="trace-pl make-base")


def train_base(
    recipe: BaseRecipe = BaseRecipe(),  # noqa: B008 - frozen, and shown by --help
    output: str = str(BASE_FOLDER),
) -> None:
    """Train the tiny base model of the closed web.

    Args:
        recipe: What to train on, and how.
        output: Folder to write; replaced as a whole when training has ended.
    """
    from trace_pl.commands.make_base.training import make_base  # takes seconds to import

    make_base(recipe, Path(output))

"""Runs the command line in this process, as a shell would start it."""

from __future__ import annotations

import sys
from unittest.mock import patch

from trace_pl.commands.main import main


def run_cli(*arguments: str) -> int:
    """Return the exit code of ``trace-pl ARGUMENTS``."""
    with patch.object(sys, "argv", ["trace-pl", *arguments]):
        try:
            return main()
        except SystemExit as stop:
            return int(stop.code or 0)

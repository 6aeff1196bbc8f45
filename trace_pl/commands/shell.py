"""Commands that work as they are printed, in the shell that reads them."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from shlex import quote


def program(name: str) -> str:
    """Return how to start a program of this environment, which need not be an active one.

    Args:
        name: Of a script that a package installed.
    """
    own = Path(sys.executable).parent / name
    found = shutil.which(name)
    if not own.is_file() or (found is not None and os.path.samefile(found, own)):
        return name
    is_below = own.is_relative_to(Path.cwd())
    return quote(str(own.relative_to(Path.cwd()) if is_below else own))

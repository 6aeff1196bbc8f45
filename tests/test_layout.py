"""Rooms of the package import one way; the order is that of the list."""

import ast
import graphlib
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = [
    "errors", "privates", "text", "files", "jsonl", "types", "probes",
    "models", "distributed", "engines", "tools", "rollout", "tasks",
    "scoring", "credit", "losses", "training", "commands", "__main__",
]  # fmt: skip
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for folder in ("trace_pl", "callbacks")
    for path in (ROOT / folder).rglob("*.py")
}


def imported(module):
    """Return the project's modules that a module names, in functions and for types as well."""
    found = set()
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{each.name}" for each in node.names}
            found |= {name if name in FILES else node.module for name in names}
    return found & FILES.keys()


IMPORTS = {module: imported(module) for module in FILES}


def test_rooms_import_only_rooms_before_them():
    assert {module.split(".")[1] for module in FILES if module.startswith("trace_pl.")} == {*ROOMS}
    places = {f"trace_pl.{room}": number for number, room in enumerate(ROOMS)}

    def place(module):
        return places.get(".".join(module.split(".")[:2]), len(ROOMS) * module.startswith("call"))

    upward = {(a, b) for a in FILES for b in IMPORTS[a] if place(b) > place(a)}
    assert upward == set()


def test_no_modules_import_each_other_in_a_circle():
    list(graphlib.TopologicalSorter(IMPORTS).static_order())  # raises a CycleError that names them


def test_credit_stands_on_torch_alone():
    """Stages are callbacks of Lightning; nothing else of it is named, nor any model."""
    allowed = {"torch", "trace_pl", "lightning.pytorch.callbacks", *sys.stdlib_module_names}
    for module in FILES:
        if module.startswith("trace_pl.credit"):
            for node in ast.walk(ast.parse(FILES[module].read_text())):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    parts = [each.name for each in node.names]
                    named = [node.module] if isinstance(node, ast.ImportFrom) else parts
                    assert all({name, name.split(".")[0]} & allowed for name in named), module

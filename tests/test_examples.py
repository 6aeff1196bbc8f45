"""The worlds of examples/, by hand and by the command line."""

import json
import sys
from pathlib import Path

import pytest
from cli_runner import run_cli

from trace_pl.tools import EnvironmentTools, FunctionTools
from trace_pl.types import Question, ToolCall

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(autouse=True)
def in_the_folder(monkeypatch):
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.syspath_prepend(EXAMPLES)
    yield
    for name in ("treasure", "arithmetic"):
        sys.modules.pop(name, None)


def test_the_treasure_is_won_step_by_step():
    from treasure import Treasure

    session = EnvironmentTools(Treasure).session(
        Question("g", "Win.", ("won",), {"key_room": "library"})
    )
    assert session.open() == "You are in the hall."
    moves = ["right", "take_key", "right", "right", "unlock_door", "open_chest"]
    results = [
        session.call(ToolCall("go", {"direction": move}) if move == "right" else ToolCall(move, {}))
        for move in moves
    ]
    assert [round(result.score, 2) for result in results] == [0.0, 0.33, 0.0, 0.0, 0.33, 0.33]
    assert [result.done for result in results] == [False] * 5 + [True]
    assert session.call(ToolCall("go", {"direction": "up"})).error == "tool"


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("(17 + 4) * 3", "63"),
        ("-7 // 2", "-4"),
        ("2 ** 9", "Error: ValueError: only whole numbers"),
        ("__import__('os')", "Error: ValueError: only whole numbers"),
        ("10**12", "Error: ValueError"),
        ("9999999 * 9999999", "Error: ValueError: numbers beyond"),
        ("(1", "Error: SyntaxError"),
        ("1 // 0", "Error: ZeroDivisionError"),
    ],
)
def test_sums_are_worked_out_and_nothing_else_is_run(expression, value):
    from arithmetic import calculate, divides

    session = FunctionTools([calculate, divides]).session(Question("s", "?", ("1",)))
    assert session.call(ToolCall("calculate", {"expression": expression})).text.startswith(value)
    assert session.call(ToolCall("divides", {"divisor": 7, "number": 63})).text == "true"


@pytest.mark.parametrize("world", ["treasure", "arithmetic"])
def test_a_world_is_trained_on_by_the_command_line(world, tmp_path):
    assert run_cli(
        "fit", "--config", "quickstart", "--config", f"{world}.yaml",
        "--data.engine=HFEngine", "--data.engine.max_model_len=1024",
        "--trainer.max_epochs=1", "--trainer.num_sanity_val_steps=0",
        "--trainer.limit_val_batches=0", "--data.questions_per_epoch=2", "--data.group_size=2",
        "--data.limits.max_trajectory_tokens=1000", "--data.limits.max_turns=2",
        "--data.limits.max_response_tokens=24",
        f"--trainer.logger.save_dir={tmp_path}",
    ) == 0  # fmt: skip
    (summary,) = tmp_path.glob("quickstart/*/summary.json")
    assert json.loads(summary.read_text())["updates"] >= 1

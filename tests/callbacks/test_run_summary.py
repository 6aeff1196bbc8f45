from pathlib import Path

import pytest

from callbacks.run_summary import RunSummary, render_summary

SUMMARY = {
    "success_before": None,
    "success_after": 0.25,
    "tool_turns_before": None,
    "tool_turns_after": None,
    "questions": 8,
    "epochs": 1,
    "updates": 2,
    "training_seconds": 3.2,
    "checkpoint": "",
}


def test_what_was_not_measured_is_not_given_a_number():
    lines = render_summary(SUMMARY, Path("runs/a/version_0")).splitlines()
    assert "Held-out success  not measured -> 25.0%   (8 questions)" in lines
    assert "Tool turns        not measured -> not measured" in lines
    assert "Checkpoint        none" in lines


@pytest.mark.parametrize(
    ("folder", "num_loggers", "end"),
    [
        ("runs/a/version_0", 1, "OutcomeOnly   #"),
        ("runs/a/version_0", 2, "OutcomeOnly   #"),
        (
            "runs/a/mine",
            1,
            "OutcomeOnly --trainer.logger.init_args.version mine-grpo   #",
        ),
        ("runs/a/mine", 2, None),
    ],
)
def test_the_next_command_takes_a_folder_of_its_own(folder, num_loggers, end):
    text = render_summary(SUMMARY, Path(folder), num_loggers)
    assert (f"fit --config {folder}/config.yaml" in text) == (end is not None)
    assert end is None or end in text


def test_a_run_without_turn_credit_is_not_offered_itself_again():
    text = render_summary(SUMMARY, Path("runs/a/version_0"), has_turn_credit=False)
    assert "OutcomeOnly" not in text
    assert "--logdir runs/a" in text


def test_both_evaluations_survive_a_resume_also_from_an_older_checkpoint():
    first, second, third = RunSummary(), RunSummary(), RunSummary()
    first._before, first._after = {"success": 0.1}, {"success": 0.2}
    second.load_state_dict(first.state_dict())
    assert (second._before, second._after) == ({"success": 0.1}, {"success": 0.2})
    third.load_state_dict({"first": [{"success": 0.1, "epoch": 0.0}]})
    assert (third._before, third._after) == ({}, {})

"""Alarms on series that do and do not set them off, and what a run prints of them."""

import pytest
from agent_runs import ANSWER, TEMPLATE, page
from scripted import ScriptedEngine, search
from scripted_epochs import fit, make_data

from callbacks import HealthMonitor
from callbacks.learning_alarms import (
    LIMIT,
    ConstantCredit,
    ParityDrift,
    SurprisalCollapse,
    TurnsCollapse,
)
from callbacks.rollout_alarms import (
    EXPECTED,
    CutResponses,
    FlatGroups,
    LostRollouts,
    NoAnswers,
    NoToolCalls,
    ToolErrors,
)
from trace_pl.errors import ConfigError
from trace_pl.rollout.parity_limits import HIGH, LARGEST, MEAN
from trace_pl.types import ToolResult

LENGTH, TRAJECTORY = "rollout/stop/length", "rollout/stop/max_tokens"
TURNS, ERRORS = "rollout/tool_turns", "rollout/tool_errors"
CREDIT = ("credit/turn_credit_max", "credit/turn_credit_min", TURNS, "credit/readiness_end")
BROKE = ("the updates broke the policy", "model.optimizer.init_args.lr")
SURE = ("loss/surprisal", "rollout/success")


def epochs(tags, *rows):
    """Return a history with one row of values for each epoch."""
    return [dict(zip(tags, row, strict=True)) for row in rows]


def parity(*rows, limits=(1.0, 0.1, 0.5)):
    """Return a history of largest, mean and high differences with their limits."""
    tags = (LARGEST, MEAN, HIGH)
    return epochs(
        (*tags, *(LIMIT.format(tag=tag) for tag in tags)), *((*row, *limits) for row in rows)
    )


ANSWERS = ("rollout/answer_rate", "rollout/count", LENGTH)
FLAT = ("rollout/zero_variance_groups", "rollout/success", "rollout/answer_rate")


@pytest.mark.parametrize(
    ("alarm", "history", "words"),
    [
        (
            NoAnswers(2),
            epochs(ANSWERS, (0.1, 128, 0.0), (0.0, 128, 0.1), (1 / 120, 120, 0.1)),
            ("1 of 248 rollouts gave an answer", "data.answer_format"),
        ),
        (
            NoAnswers(1),
            epochs(ANSWERS, (0.0, 128, 0.9)),
            ("0 of 128", "in the last epoch", "data.limits.max_response_tokens"),
        ),
        (
            NoAnswers(1),
            epochs((*ANSWERS, TRAJECTORY), (0.0, 8, 0.1, 0.9)),
            ("data.limits.max_trajectory_tokens",),
        ),
        (NoAnswers(1), epochs(ANSWERS, (0.7, 128, 0.0), (0.0, 128, 0.9)), BROKE),
        (NoToolCalls(1), epochs((TURNS,), (1.4,), (0.0,)), BROKE),
        (CutResponses(1), epochs((LENGTH, TRAJECTORY), (0.1, 0.0), (0.9, 0.0)), BROKE),
        (
            ToolErrors(1),
            epochs((TURNS, ERRORS, f"{ERRORS}/parse"), (2, 0.1, 0.1), (1, 0.9, 0.8)),
            BROKE,
        ),
        (
            LostRollouts(1),
            epochs(("rollout/count", EXPECTED), (64, 128)),
            ("50% of 128 rollouts were lost", "data.limits.tool_timeout_s"),
        ),
        (NoToolCalls(2), epochs((TURNS,), (0.0,), (0.0,)), ("data.call_format",)),
        (
            NoToolCalls(1),
            epochs((TURNS, LENGTH), (0.0, 0.8)),
            ("data.limits.max_response_tokens",),
        ),
        (
            FlatGroups(2),
            epochs(FLAT, (1.0, 0.0, 0.9), (1.0, 0.0, 0.9)),
            ("for 2 epochs", "too hard", "data.group_size"),
        ),
        (FlatGroups(1), epochs(FLAT, (1.0, 1.0, 1.0)), ("too easy",)),
        (
            FlatGroups(1),
            epochs((*FLAT, "rollout/stop/max_turns"), (1.0, 0.0, 0.2, 0.8)),
            ("use all their turns", "data.limits.max_turns"),
        ),
        (FlatGroups(1), epochs(FLAT, (1.0, 0.0, 0.0)), ("Hardly any rollout gives an answer",)),
        (
            ToolErrors(2),
            epochs((TURNS, ERRORS, f"{ERRORS}/parse"), (1, 0.6, 0.4), (1, 0.9, 0.8)),
            ("90% of the tool calls", "data.call_format"),
        ),
        (
            ToolErrors(1),
            epochs((TURNS, ERRORS, f"{ERRORS}/timeout"), (1, 0.6, 0.4)),
            ("run out of time", "data.task"),
        ),
        (
            CutResponses(1),
            epochs((LENGTH, TRAJECTORY), (0.6, 0.0)),
            ("60% of the rollouts", "data.limits.max_response_tokens"),
        ),
        (
            CutResponses(1),
            epochs((LENGTH, TRAJECTORY), (0.0, 0.6)),
            ("data.limits.max_trajectory_tokens",),
        ),
        (
            SurprisalCollapse(2),
            epochs(("loss/surprisal",), (0.5,), (0.3,), (0.2,), (0.05,), (0.02,)),
            ("0.035 nats, 0.4 in the first epochs", "model.optimizer.init_args.lr"),
        ),
        (
            TurnsCollapse(1),
            epochs((TURNS,), (4.0,), (2.0,), (0.5,)),
            ("0.5 tool turns, 4 in the first", "credit.anchor.init_args.turn_weight"),
        ),
        (
            ConstantCredit(2),
            epochs(CREDIT, (0.0, 0.0, 2.0, -1.0), (0.1, 0.1, 2.0, -1.0)),
            ("credit.prober", "model.reference_name"),
        ),
        (
            ParityDrift(2),
            parity((0.13, 0.0, 0.0), (0.2, 0.0, 0.0), limits=(0.25, 0.25, 0.25)),
            ("0.2 nats at most", "50% of the limit (0.25)", "data.engine.init_args.dtype"),
        ),
        (
            ParityDrift(1),
            parity((0.4, 0.06, 0.3)),
            ("0.06 nats on average", "the limit (0.1)", "data.parity_tolerance"),
        ),
        (ParityDrift(1), parity((0.4, 0.01, 0.3)), ("0.3 nats in the 99th percentile",)),
        (ParityDrift(1), parity((1.4, 0.01, 0.1)), ("1.4 nats at most", "the limit (1)")),
    ],
)
def test_a_series_sets_off_its_alarm(alarm, history, words):
    message = alarm.message(history)
    assert message is not None
    assert "\n" not in message
    for part in words:
        assert part in message


@pytest.mark.parametrize(
    ("alarm", "history"),
    [
        (NoAnswers(2), epochs(ANSWERS, (0.0, 128, 0.1))),  # too early
        (NoAnswers(2), epochs(ANSWERS, (0.0, 128, 0.1), (0.03, 128, 0.1))),
        (LostRollouts(2), epochs(("rollout/count", EXPECTED), (64, 128), (120, 128))),
        (NoToolCalls(2), epochs((TURNS,), (0.0,), (0.1,))),
        (FlatGroups(2), epochs(FLAT, (1.0, 0.0, 1.0), (0.9, 0.0, 1.0))),
        (ToolErrors(2), epochs((TURNS, ERRORS), (1, 0.6), (1, 0.4))),
        (ToolErrors(1), epochs((TURNS, ERRORS), (0, 0.6))),  # an earlier epoch's share
        (CutResponses(2), epochs((LENGTH, TRAJECTORY), (0.6, 0.0), (0.4, 0.6))),
        (SurprisalCollapse(2), epochs(("loss/surprisal",), (0.5,), (0.5,), (0.02,))),
        (SurprisalCollapse(1), epochs(("loss/surprisal",), (0.5,), (0.1,))),
        (SurprisalCollapse(1), epochs(SURE, (0.5, 0.1), (0.01, 0.95))),  # sure because right
        (TurnsCollapse(1), epochs((TURNS,), (0.0,), (0.0,))),
        (ConstantCredit(1), epochs(CREDIT, (0.1, -0.1, 2.0, -1.0))),
        (ConstantCredit(1), epochs(CREDIT, (0.0, 0.0, 0.0, -1.0))),  # no turns, no credit
        (ConstantCredit(1), epochs(CREDIT, (0.0, 0.0, 2.0, 0.0))),  # callbacks.NoProber
        (ConstantCredit(1), epochs((TURNS,), (2.0,))),  # outcome-only
        (ParityDrift(2), parity((0.2, 0.1, 0.2), (0.4, 0.01, 0.2))),
    ],
)
def test_a_series_leaves_its_alarm_off(alarm, history):
    assert alarm.message(history) is None


@pytest.mark.parametrize("alarm", HealthMonitor().alarms, ids=lambda alarm: alarm.name)
def test_an_alarm_without_its_metrics_stays_off(alarm):
    limits = {LIMIT.format(tag=tag): 1e-3 for tag in (LARGEST, MEAN, HIGH)}
    assert alarm.message([limits] * 20) is None


def test_the_monitor_reads_what_the_alarms_read():
    tags = {tag for alarm in HealthMonitor().alarms for tag in alarm.tags}
    assert {"rollout/count", "loss/surprisal", "weights/parity_nats", MEAN, HIGH, *CREDIT} <= tags


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"patience": 0}, "HealthMonitor.patience of at least 1, got 0"),
        ({"max_cut": 1.5}, "HealthMonitor.max_cut within 0 and 1, got 1.5"),
        ({"min_surprisal": float("nan")}, "HealthMonitor.min_surprisal"),
    ],
)
def test_a_threshold_out_of_range_is_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        HealthMonitor(**settings)


# --- in a run --------------------------------------------------------------------------------

SILENT = ["I do not know."]


def broken(question, call, number):
    return ToolResult("Error: no such index.", error="tool")


def run(model_dir, script, monitor, tools=page, num_epochs=3):
    engine = ScriptedEngine(TEMPLATE, {"*": script})
    return fit(make_data(model_dir, engine, tools), num_epochs, [monitor])[1]


def lines(capsys):
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("Health: ")]


def test_a_policy_that_never_answers_is_said_once_and_logged_each_epoch(tiny_model_dir, capsys):
    metrics = run(tiny_model_dir, [search("a"), *SILENT], HealthMonitor())
    assert lines(capsys) == [
        "Health: 0 of 12 rollouts gave an answer in each of the last 2 epochs, so there is nothing "
        "to reward. Likely the final messages (see the text rollout/0) hold answers in another "
        "form than the one that is read. Set data.answer_format to it, or ask for it in "
        "data.system_prompt."
    ]
    assert metrics["health/no_answers"] == 1.0
    assert metrics["health/no_tool_calls"] == 0.0


def test_tools_that_fail_are_named(tiny_model_dir, capsys):
    run(tiny_model_dir, [search("a"), search("b"), ANSWER], HealthMonitor(), broken, 2)
    (line,) = lines(capsys)
    assert line.startswith("Health: 100% of the tool calls failed")
    assert "Check the tools of data.task" in line


def test_a_service_that_is_down_for_half_of_the_questions_is_noticed(tiny_model_dir, capsys):
    def down_for_some(question, call, number):
        if int(question[-2]) % 2:
            raise ConnectionError("service is down")
        return page(question, call, number)

    # A rollout that failed is tried once more, and goes on in the script.
    engine = ScriptedEngine(TEMPLATE, {"*": [search("a"), search("a"), ANSWER]})
    data = make_data(tiny_model_dir, engine, down_for_some, questions_per_epoch=9)
    fit(data, 1, [HealthMonitor(patience=1, flat_patience=9)])
    (line,) = lines(capsys)
    assert line.startswith("Health: 44% of 18 rollouts were lost")


def test_a_healthy_run_is_silent(tiny_model_dir, capsys):
    metrics = run(tiny_model_dir, [search("a"), ANSWER], HealthMonitor(flat_patience=9))
    assert not lines(capsys)
    found = {name: float(v) for name, v in metrics.items() if name.startswith("health/")}
    assert set(found.values()) == {0.0}
    assert len(found) == 10


def test_what_was_said_is_not_said_again_after_a_resume(tiny_model_dir, capsys):
    first = HealthMonitor()
    run(tiny_model_dir, SILENT, first, num_epochs=2)
    assert len(lines(capsys)) == 2  # no answers, no tool calls
    resumed = HealthMonitor()
    resumed.load_state_dict(first.state_dict())
    metrics = run(tiny_model_dir, SILENT, resumed, num_epochs=1)
    assert not lines(capsys)
    assert metrics["health/no_answers"] == 1.0  # after one epoch: the earlier ones are remembered

import pytest

from trace_pl.training.run_identity import Change, describe, differences, flat, identity

CONFIG = {
    "seed_everything": 0,
    "trainer": {"max_epochs": 15, "devices": 1, "gradient_clip_val": 1.0, "callbacks": None},
    "credit": {
        "anchor": {"class_path": "callbacks.TraceAnchor", "init_args": {"turn_weight": 0.2}},
        "assigner": {"tokens_per_forward": 8192},
    },
    "model": {
        "model_name": "base",
        "loss": None,
        "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-6}},
        "compile_layers": False,
    },
    "data": {
        "task": {"class_path": "tasks.FileTask", "init_args": {"train": "train.jsonl"}},
        "engine": {
            "class_path": "engines.VLLMEngine",
            "init_args": {"temperature": 1.0, "max_num_seqs": 16},
        },
        "limits": {"max_turns": 7, "tool_timeout_s": 20.0},
        "hops": [3],
        "tokens_per_forward": 8192,
        "evaluation_questions": 128,
    },
}


def with_value(key, value):
    """Return CONFIG with the value at a dotted key."""
    *path, last = key.split(".")
    tree = copy = {**CONFIG}
    for name in path:
        copy[name] = {**copy[name]}
        copy = copy[name]
    copy[last] = value
    return tree


def changed_keys(config):
    return [change.key for change in differences(identity(CONFIG), identity(config))]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed_everything", 1),
        ("trainer.gradient_clip_val", 0.5),
        ("credit.anchor.init_args.turn_weight", 0.1),
        ("model.model_name", "other"),
        ("model.optimizer.init_args.lr", 1e-5),
        ("data.task.init_args.train", "other.jsonl"),
        ("data.engine.init_args.temperature", 0.7),
        ("data.limits.max_turns", 8),
        ("data.hops", [3, 4]),
    ],
)
def test_what_a_step_learns_makes_another_run(key, value):
    assert changed_keys(with_value(key, value)) == [key]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainer.max_epochs", 60),
        ("trainer.devices", 8),
        ("trainer.callbacks", []),
        ("credit.assigner.tokens_per_forward", 1),
        ("model.compile_layers", True),
        ("data.engine.init_args.max_num_seqs", 1),
        ("data.engine.class_path", "engines.HFEngine"),
        ("data.limits.tool_timeout_s", 60.0),
        ("data.limits.reward_timeout_s", 5.0),
        ("data.limits.reward_retries", 0),
        ("data.tokens_per_forward", 1),
        ("data.evaluation_questions", 1),
    ],
)
def test_where_and_how_fast_a_run_runs_is_free(key, value):
    assert changed_keys(with_value(key, value)) == []


def test_of_another_class_the_name_alone_is_told():
    other = {"class_path": "callbacks.OutcomeOnly", "init_args": {"outcome_weight": 1.0}}
    (change,) = differences(identity(CONFIG), identity(with_value("credit.anchor", other)))
    assert change == Change(
        "credit.anchor.class_path", "callbacks.TraceAnchor", "callbacks.OutcomeOnly"
    )
    assert str(change) == "credit.anchor 'callbacks.OutcomeOnly' instead of 'callbacks.TraceAnchor'"


def test_a_class_where_there_was_none_is_a_change_and_so_is_the_reverse():
    loss = {"class_path": "losses.SequenceClip", "init_args": {"clip_low": 0.1}}
    assert changed_keys(with_value("model.loss", loss)) == ["model.loss.class_path"]
    back = differences(identity(with_value("model.loss", loss)), identity(CONFIG))
    assert [(change.before, change.after) for change in back] == [("losses.SequenceClip", None)]


def test_a_setting_that_only_one_version_of_the_program_knows_is_told_apart():
    assert differences({"a": 1}, {"a": 1, "new": None}) == []
    assert differences({"a": 1}, {"a": 1, "new": 2}) == [Change("new", None, 2, True)]
    assert differences({"a": 1, "old": 2}, {"a": 1}) == [Change("old", 2, None, True)]
    assert differences({"a": None}, {"a.b": 2}) == [Change("a.b", None, 2, False)]
    assert differences({"a": {}}, {"a.b": 2})[1:] == [Change("a", {}, None, False)]


@pytest.mark.parametrize(
    ("name", "names_it"),
    [
        ("model.optimizer.init_args.lr", True),
        ("model.optimizer", True),
        ("model", True),
        ("model.opt", False),
        ("model.optimizer.init_args.lr.x", False),
        ("", False),
    ],
)
def test_a_change_is_named_by_its_key_or_a_section_above(name, names_it):
    assert Change("model.optimizer.init_args.lr", 1, 2).is_named_by([name]) == names_it


def test_many_changes_are_told_in_part():
    changes = [Change(f"data.k{i}", 0, i) for i in range(1, 7)]
    assert describe(changes).endswith("data.k4 4 instead of 0; and 2 more")


def test_empty_mappings_and_lists_are_leaves():
    assert flat({"a": {"b": {}, "c": [1]}}) == {"a.b": {}, "a.c": [1]}

import pytest
from builders import question

from trace_pl.errors import ConfigError, DataError
from trace_pl.tasks.asked import AskedQuestions


class Task:
    """Has as many questions of each split as it is told, and counts how often it is asked."""

    def __init__(self, train: int, validation: int, test: int) -> None:
        self.counts = {"train": train, "validation": validation, "test": test}
        self.num_reads = 0

    def questions(self, split):
        self.num_reads += 1
        return [question(number) for number in range(self.counts[split])]


def asked(train=4, validation=5, test=6, at_least=2):
    """The asked questions of a task with so many in each split."""
    return AskedQuestions(Task(train, validation, test), at_least, {})


def test_without_a_limit_all_questions_are_asked_and_nothing_is_said(capsys):
    found = asked(test=1319, validation=128)
    assert len(found.questions("test")) == 1319
    assert capsys.readouterr().out == ""


def test_a_limit_takes_the_first_questions_and_is_printed_once_if_it_cuts(capsys):
    found = AskedQuestions(Task(4, 128, 1319), 2, {"validation": 128, "test": 200})
    assert [q.id for q in found.questions("test")] == [f"q{n}" for n in range(200)]
    assert len(found.questions("test")) == 200
    assert len(found.questions("validation")) == 128
    assert capsys.readouterr().out == "200 of 1,319 test questions (data.test_questions)\n"


def accept(question):
    """Find nothing wrong with a question."""


@pytest.mark.parametrize(
    ("stage", "count"), [("fit", 4 + 5), ("validate", 5), ("test", 6), ("predict", 6)]
)
def test_a_stage_reads_and_checks_the_splits_it_asks_and_each_of_them_once(stage, count):
    found, checked = asked(), []
    for _ in range(2):
        found.read(stage, 1, checked.append)
    assert len(checked) == count
    assert found.task.num_reads == (2 if stage == "fit" else 1)


def test_a_split_whose_check_failed_is_checked_again():
    def refuse(question):
        raise DataError("no room")

    found = asked()
    for _ in range(2):
        with pytest.raises(DataError, match="no room"):
            found.read("test", 1, refuse)
    found.read("test", 1, accept)


def test_too_few_training_questions_matter_to_training_alone():
    found = asked(train=12, at_least=16)
    for stage in ("validate", "test", "predict"):
        found.read(stage, 1, accept)
    with pytest.raises(ConfigError, match=r"at least 16 training questions .* got 12"):
        found.read("fit", 1, accept)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_an_empty_split_is_refused(split):
    with pytest.raises(DataError, match=f"at least one {split} question from Task, got none"):
        asked(**{split: 0}).read("fit", 1, accept)


def test_ranks_without_a_question_are_refused():
    found = AskedQuestions(Task(4, 5, 9), 2, {"test": 3})
    found.read("test", 3, accept)
    with pytest.raises(ConfigError, match="one test question for each of 4 ranks, got 3"):
        found.read("test", 4, accept)

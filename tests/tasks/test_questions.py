import json

import numpy as np
import pytest

from trace_pl.errors import ConfigError, DataError
from trace_pl.tasks.questions import fingerprint, gold_answers, load_questions
from trace_pl.types import Question


def write(path, *rows):
    """Write rows, JSON objects or raw lines, to a file."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def row(**fields):
    """Return a good row with some fields replaced."""
    return {"id": "q1", "question": "Who built it?", "answer": "Mira Holt", **fields}


def test_a_row_becomes_a_question_and_its_other_fields_become_meta(tmp_path):
    path = write(tmp_path / "q.jsonl", row(answer_aliases=["M. Holt", "Mira Holt"], hops=2))
    assert load_questions(path) == [
        Question("q1", "Who built it?", ("Mira Holt", "M. Holt"), {"hops": 2})
    ]


@pytest.mark.parametrize(
    ("fields", "evidence"),
    [
        ({}, ()),
        ({"evidence": None}, ()),
        ({"evidence": []}, ()),
        ({"evidence": ["007", 7]}, ("007", "7")),
    ],
)
def test_evidence_is_a_list_of_docids_or_unknown(tmp_path, fields, evidence):
    (question,) = load_questions(write(tmp_path / "q.jsonl", row(**fields)))
    assert question.evidence == evidence


@pytest.mark.parametrize("evidence", ["d1", 7, {"docid": "d1"}, ["d1", None], [True], [["d1"]]])
def test_evidence_of_another_kind_is_refused_when_it_is_read(tmp_path, evidence):
    path = write(tmp_path / "q.jsonl", row(id="q0"), row(evidence=evidence))
    with pytest.raises(DataError, match="list of docids") as caught:
        load_questions(path)
    assert f"{path}:2" in str(caught.value)


def test_null_is_as_good_as_absent_in_every_field(tmp_path):
    fields = {"answer": None, "answers": ["Mira"], "answer_aliases": None, "hops": None}
    (question,) = load_questions(write(tmp_path / "q.jsonl", row(**fields)))
    assert question == Question("q1", "Who built it?", ("Mira",), {})


def test_order_is_kept_blank_lines_are_skipped_and_number_ids_become_text(tmp_path):
    path = write(tmp_path / "q.jsonl", row(id="007"), "", row(id=7))
    assert [question.id for question in load_questions(path)] == ["007", "7"]


@pytest.mark.parametrize(
    "gold",
    [
        {"answer": ["Mira", "M. Holt"]},
        {"golden_answers": ["Mira", "M. Holt"]},
        {"answers": {"target": ["Mira", "M. Holt"]}},
        {"reward_model": {"style": "rule", "ground_truth": {"target": ["Mira", "M. Holt"]}}},
        {"answer": "Mira", "answer_aliases": "M. Holt"},
        {"answer": None, "golden_answers": ["Mira"], "answer_aliases": ["M. Holt"]},
    ],
)
def test_every_published_shape_gives_the_same_answers(tmp_path, gold):
    path = write(tmp_path / "q.jsonl", {"id": "q1", "question": "Who?", **gold})
    assert load_questions(path)[0].answers == ("Mira", "M. Holt")


@pytest.mark.parametrize(
    ("value", "answers"),
    [
        ("Mira", ("Mira",)),
        (1969, ("1969",)),
        (("Mira", "Holt"), ("Mira", "Holt")),
        (np.array(["Mira", "Holt"]), ("Mira", "Holt")),
        ({"target": np.array(["Mira"])}, ("Mira",)),
        ([], ()),
    ],
)
def test_gold_answers_come_out_of_text_number_list_tuple_array_and_target(value, answers):
    assert gold_answers(value) == answers


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{not json", "one JSON object in UTF-8"),
        ("[1, 2]", "got list"),
        (row(id=None), "'id'"),
        (row(id=True), "'id'"),
        (row(question="  "), "'question'"),
        (row(answer=None), "Expected a gold answer"),
        (row(answer=[]), "at least one letter or digit"),
        (row(answer="?"), "at least one letter or digit"),
        (row(answer=["Mira", ""]), "at least one letter or digit"),
        (row(answer=True), "question 'q1'"),
        (row(answer={"text": "Mira"}), "question 'q1'"),
        (row(id="q0"), "already at .*q.jsonl:1"),
    ],
)
def test_a_bad_row_is_refused_with_its_file_and_line(tmp_path, bad, message):
    path = write(tmp_path / "q.jsonl", row(id="q0"), bad)
    with pytest.raises(DataError, match=message) as caught:
        load_questions(path)
    assert f"{path}:2" in str(caught.value)


def test_a_missing_file_and_an_empty_file_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="Expected a JSONL file"):
        load_questions(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="at least one question"):
        load_questions(write(tmp_path / "q.jsonl", ""))


def test_a_byte_order_mark_and_control_characters_are_removed(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text("\ufeff" + json.dumps(row(question="Who\u0000 built\r\nit?\ud800")))
    assert load_questions(path)[0].text == "Who built\nit?"


def test_the_fingerprint_changes_with_ids_texts_answers_and_order_but_not_with_meta():
    one, two = Question("1", "Who?", ("Mira",)), Question("2", "Where?", ("Arden",))
    base = fingerprint([one, two])
    assert base == fingerprint([Question("1", "Who?", ("Mira",), {"hops": 2}), two])
    others = [
        [two, one],
        [one],
        [Question("3", "Who?", ("Mira",)), two],
        [Question("1", "Who?!", ("Mira",)), two],
        [Question("1", "Who?", ("Mira", "M")), two],
    ]
    assert base not in {fingerprint(other) for other in others}
    assert base == "11e3d174dee0d15e3f246bce1f4378e9be84a830636c920727857ebd2187c3be"

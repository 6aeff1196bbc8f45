import json

import pytest

from trace_pl.errors import ConfigError, DataError
from trace_pl.tools.corpus import Corpus, Document


def load(tmp_path, *rows):
    """Write rows to a file and read them as a corpus."""
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Corpus.from_jsonl(path)


def test_either_name_of_a_field_is_read_and_ids_stay_text(tmp_path):
    corpus = load(
        tmp_path,
        {"docid": "007", "title": "One", "text": "First."},
        {"id": 7, "title": "Two", "contents": "Second."},
    )
    assert list(corpus.values()) == [
        Document("007", "One", "First."),
        Document("7", "Two", "Second."),
    ]


@pytest.mark.parametrize(
    ("text", "title", "body"),
    [
        ('---\ntitle: "Arden: x"\ndate: 1902\n---\nBody.', "Arden: x", "Body.\n\ndate: 1902"),
        ("---\ntitle: Arden\n---\nA\n\n---\n\nB", "Arden", "A\n\n---\n\nB"),
        ("---\nauthor:\n  - Mira\n---\nBody.", "d", "Body.\n\nauthor:\n  - Mira"),
        ("Body.\n---\ntitle: No\n---\nMore.", "d", "Body.\n---\ntitle: No\n---\nMore."),
        ("---\nA rule before prose.\n---\nMore.", "d", "---\nA rule before prose.\n---\nMore."),
        ("| a | b |\n---\n| 1 | 2 |", "d", "| a | b |\n---\n| 1 | 2 |"),
        ("\n---\ntitle: No\n---\nMore.", "d", "\n---\ntitle: No\n---\nMore."),
    ],
)  # fmt: skip
def test_front_matter_is_read_at_the_start_only_and_nothing_of_a_page_is_lost(
    tmp_path, text, title, body
):
    assert load(tmp_path, {"id": "d", "text": text})["d"] == Document("d", title, body)


AARON = "Aaron Lake is a lake in Manitoba."


@pytest.mark.parametrize(
    ("contents", "title", "text"),
    [
        (f'"Aaron Lake"\n{AARON}', "Aaron Lake", AARON),
        (f"Aaron Lake\n\n{AARON}\n", "Aaron Lake", AARON),
        (f'"Yahoo!"\r\n{AARON}\nMore.', "Yahoo!", f"{AARON}\nMore."),
        (f'"""Weird Al"" Yankovic"\n{AARON}', '"Weird Al" Yankovic', AARON),
        (f'"Up" and "Down"\n{AARON}', '"Up" and "Down"', AARON),
        ("\u5317\u4eac\n\u9996\u90fd\u3002", "\u5317\u4eac", "\u9996\u90fd\u3002"),
        (f'---\ntitle: Front\n---\n"Aaron"\n{AARON}', "Front", f'"Aaron"\n{AARON}'),
        # From here on the first line is no title, and the text stays whole.
        ('"Aaron Lake"', "d", '"Aaron Lake"'),
        (f"{AARON}\nMore.", "d", f"{AARON}\nMore."),
        ("A lake of the north that\nno road reaches.", "d",
         "A lake of the north that\nno road reaches."),
        (f"{'long ' * 20}\n{AARON}", "d", f"{'long ' * 20}\n{AARON}"),
        (f'"{"x" * 251}"\n{AARON}', "d", f'"{"x" * 251}"\n{AARON}'),
        (f'""\n{AARON}', "d", f'""\n{AARON}'),
        (f"---\n{AARON}", "d", f"---\n{AARON}"),
    ],
)  # fmt: skip
def test_the_first_line_of_contents_is_the_title_if_it_looks_like_one(
    tmp_path, contents, title, text
):
    assert load(tmp_path, {"id": "d", "contents": contents})["d"] == Document("d", title, text)


@pytest.mark.parametrize(
    ("fields", "title"),
    [
        ({"contents": f'"Aaron"\n{AARON}', "title": "Field"}, "Field"),
        ({"contents": f'"Aaron"\n{AARON}', "title": None, "text": None}, "Aaron"),
        ({"contents": f'"Aaron"\n{AARON}', "title": " "}, "Aaron"),
        ({"text": f'"Aaron"\n{AARON}'}, "d"),
        ({"text": AARON, "title": ""}, "d"),
    ],
)
def test_a_title_field_wins_and_a_first_line_of_text_is_text(tmp_path, fields, title):
    document = load(tmp_path, {"id": "d", **fields})["d"]
    assert document.title == title
    assert document.text.endswith(AARON)


def test_a_title_field_wins_over_front_matter(tmp_path):
    corpus = load(tmp_path, {"id": "d", "title": "Field", "text": "---\ntitle: Front\n---\nBody."})
    assert corpus["d"] == Document("d", "Field", "Body.")


def test_controls_and_lone_surrogates_go_newlines_are_one_kind_and_the_rest_stays():
    text = "a\x00b\r\nc\rd\u2028e\tf\x1b[0m\ud800 \U0001f600 <b and c> \u3010x\u3011"
    cleaned = Corpus([Document("d", "T\x07", text)])["d"]
    assert cleaned.title == "T"
    assert cleaned.text == "ab\nc\nd\ne\tf[0m \U0001f600 <b and c> \u3010x\u3011"


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"id": "a", "text": "again"}, "already at .*corpus.jsonl:1"),
        ({"text": "no id"}, "'docid' or 'id'"),
        ({"id": " ", "text": "blank id"}, "'docid' or 'id'"),
        ({"id": "b"}, "'text' or 'contents'"),
        ({"id": "b", "text": "\u0000"}, "'text' or 'contents'"),
        ({"id": "b", "text": "x", "title": 3}, "'title'"),
        ("text", "got str"),
    ],
)
def test_a_bad_line_is_refused_with_its_file_and_line(tmp_path, bad, message):
    with pytest.raises(DataError, match=message) as caught:
        load(tmp_path, {"id": "a", "text": "first"}, bad)
    assert "corpus.jsonl:2" in str(caught.value)


def test_a_line_that_is_not_utf8_is_refused(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(b'{"id": "a", "text": "caf\xe9"}\n')
    with pytest.raises(DataError, match=r"UTF-8 at .*corpus.jsonl:1"):
        Corpus.from_jsonl(path)


def test_a_missing_file_an_empty_file_no_documents_and_twins_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="Expected a JSONL file"):
        Corpus.from_jsonl(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="got an empty file"):
        load(tmp_path)
    with pytest.raises(DataError, match="got none"):
        Corpus([])
    with pytest.raises(DataError, match="'a' twice"):
        Corpus([Document("a", "", "x"), Document("a", "", "x")])


def test_the_fingerprint_depends_on_content_and_not_on_order():
    one, two = Document("1", "One", "x"), Document("2", "Two", "y")
    assert Corpus([one, two]).fingerprint == Corpus([two, one]).fingerprint
    assert Corpus([one]).fingerprint != Corpus([Document("1", "Onex", "")]).fingerprint
    assert (
        Corpus([one, two]).fingerprint
        == "06a023fa244a1b58a864369760cd7204e7a3d1ac0e9a069f33dbbd5c03447f9e"
    )

import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
from pages import corpus

from trace_pl.errors import ConfigError
from trace_pl.tools.corpus import Corpus, Document
from trace_pl.tools.index import Bm25Index
from trace_pl.tools.stored_index import StoredBm25Index

EXPECTED = Bm25Index(corpus()).search("Arden tower", 3)


def stored(folder: Path, documents: Corpus | None = None) -> StoredBm25Index:
    return StoredBm25Index(documents or corpus(), str(folder))


def times(folder: Path) -> dict[str, int]:
    """When each file below a folder was written."""
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def indexes(folder: Path) -> list[Path]:
    """The indexes in a folder; whatever else is there but locks is a leftover."""
    return sorted(path for path in folder.iterdir() if path.suffix != ".lock")


def test_an_index_is_built_once_and_answers_like_one_in_memory(tmp_path, capsys):
    first = stored(tmp_path / "made")
    (path,) = indexes(tmp_path / "made")
    assert capsys.readouterr().out == f"Building a search index of 4 documents in {path} ...\n"
    made = times(path)
    second = stored(tmp_path / "made")
    assert times(path) == made
    assert capsys.readouterr().out == ""
    assert first.search("Arden tower", 3) == second.search("Arden tower", 3) == EXPECTED


def test_another_corpus_gets_an_index_of_its_own(tmp_path):
    stored(tmp_path)
    other = stored(tmp_path, Corpus([Document("x", "X", "another tower")]))
    assert [hit.docid for hit in other.search("tower", 3)] == ["x"]
    assert len(indexes(tmp_path)) == 2
    assert stored(tmp_path).search("Arden tower", 3) == EXPECTED


def cut(path: Path) -> None:
    """Lose the end of the largest file."""
    largest = max(path.iterdir(), key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])


def remove_a_file(path: Path) -> None:
    next(path.glob("*.term")).unlink()


def remove_the_label(path: Path) -> None:
    (path / "trace_pl.json").unlink()


def garble_the_label(path: Path) -> None:
    (path / "trace_pl.json").write_text("[1]")


def be_another_version(path: Path) -> None:
    label = path / "trace_pl.json"
    contents = json.loads(label.read_text())
    contents["label"]["tantivy"] = "0.1"
    label.write_text(json.dumps(contents))


@pytest.mark.parametrize(
    "damage",
    [cut, remove_a_file, remove_the_label, garble_the_label, be_another_version],
    ids=lambda damage: damage.__name__,
)
def test_a_damaged_index_is_built_again(tmp_path, damage, caplog):
    stored(tmp_path)
    (path,) = indexes(tmp_path)
    damage(path)
    assert stored(tmp_path).search("Arden tower", 3) == EXPECTED
    assert f"The search index in '{path}' cannot be used" in caplog.text
    caplog.clear()
    stored(tmp_path)
    assert caplog.text == ""
    assert indexes(tmp_path) == [path]


def test_what_a_killed_process_left_is_removed(tmp_path):
    stored(tmp_path)
    (path,) = indexes(tmp_path)
    path.rename(tmp_path / f".{path.name}.abc")
    stored(tmp_path)
    assert indexes(tmp_path) == [path]


def test_those_that_start_together_build_one_index(tmp_path, capsys):
    start = Barrier(4)  # a lock is of an open file, so threads meet at it like processes

    def search(_):
        start.wait()
        return stored(tmp_path).search("Arden tower", 3)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(search, range(4))) == [EXPECTED] * 4
    assert len(indexes(tmp_path)) == 1
    assert capsys.readouterr().out.count("Building") == 1


def test_a_pickled_index_opens_the_stored_one(tmp_path):
    index = stored(tmp_path)
    made = times(tmp_path)
    copy = pickle.loads(pickle.dumps(index))
    assert copy.search("Arden tower", 3) == EXPECTED
    assert times(tmp_path) == made


@pytest.mark.parametrize("is_parent", [True, False])
def test_a_named_folder_that_can_not_be_used_is_refused_in_one_line(tmp_path, is_parent):
    folder = tmp_path / "file"
    folder.write_text("not a folder")
    with pytest.raises(ConfigError, match="Expected a folder for search indexes at") as caught:
        stored(folder / "below" if is_parent else folder)
    assert "\n" not in str(caught.value)


def test_without_a_name_the_folder_is_in_the_cache_else_a_temporary_one_else_memory(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    StoredBm25Index(corpus())
    assert len(indexes(tmp_path / "cache" / "trace_pl" / "indexes")) == 1
    assert caplog.text == ""

    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert StoredBm25Index(corpus()).search("Arden tower", 3) == EXPECTED
    (temporary,) = tmp_path.glob("trace_pl-*")
    assert temporary.stat().st_mode & 0o777 == 0o700
    assert len(indexes(temporary)) == 1

    temporary.chmod(0o777)  # somebody else could have put anything there
    assert StoredBm25Index(corpus()).search("Arden tower", 3) == EXPECTED
    assert "belongs to somebody else" in caplog.text

"""What is written has its name as a whole, or not at all."""

import pytest

from trace_pl.files import file_beside, folder_beside, write_atomically


def test_a_file_keeps_its_contents_until_the_new_ones_are_complete(tmp_path):
    path = tmp_path / "runs" / "summary.json"
    write_atomically(path, "before")

    def write_half():
        with file_beside(path, is_durable=True) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert path.read_text() == "before"
    assert list(path.parent.iterdir()) == [path]
    write_atomically(path, "after \ud800")
    assert path.read_text() == "after \\ud800"
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_folder_takes_the_place_of_another_only_where_that_is_wanted(tmp_path):
    path = tmp_path / "index"
    with folder_beside(path) as draft:
        (draft / "part").write_text("1")
        (draft / "part").chmod(0o600)
    assert (path / "part").stat().st_mode & 0o777 == 0o644
    with pytest.raises(OSError, match="not empty"), folder_beside(path) as draft:
        (draft / "part").write_text("2")
    assert (path / "part").read_text() == "1"
    with pytest.raises(ValueError, match="broken"), folder_beside(path, replaces=True) as draft:
        raise ValueError("broken")
    assert (path / "part").read_text() == "1"
    with folder_beside(path, replaces=True) as draft:
        (draft / "part").write_text("3")
    assert (path / "part").read_text() == "3"
    assert list(tmp_path.iterdir()) == [path]

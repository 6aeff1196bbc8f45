import pytest
import torch
from safetensors.torch import load_file

from trace_pl.engines.server.weight_files import WeightFiles
from trace_pl.errors import ConfigError, RolloutError

SIZES = {"a": 100_000, "b": 100_000, "big": 700_000, "c": 100_000}


def tensors():
    return [(name, torch.full((size,), float(size))) for name, size in SIZES.items()]


def test_files_of_a_bounded_size_come_one_at_a_time_and_hold_everything(tmp_path):
    found, names = {}, []
    for path in WeightFiles(file_mib=1).write(tensors(), tmp_path):
        assert list(tmp_path.iterdir()) == [path]
        found |= load_file(path)
        names.append(sorted(load_file(path)))
    assert names == [["a", "b"], ["big"], ["c"]]
    assert {name: tensor.shape[0] for name, tensor in found.items()} == SIZES
    assert all(bool((found[name] == size).all()) for name, size in SIZES.items())
    assert list(tmp_path.iterdir()) == []


def test_slices_and_transposes_are_written_as_they_read(tmp_path):
    matrix = torch.arange(12.0).reshape(3, 4)
    files = WeightFiles().write([("t", matrix.T), ("s", matrix[:, 1])], tmp_path)
    found = load_file(next(files))
    assert torch.equal(found["t"], matrix.T)
    assert torch.equal(found["s"], matrix[:, 1])
    files.close()


def test_a_file_is_gone_when_its_reader_fails(tmp_path):
    files = WeightFiles().write(tensors(), tmp_path)
    path = next(files)
    assert path.exists()
    files.close()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_can_not_be_written_is_an_error(tmp_path):
    with pytest.raises(RolloutError, match=r"Weights could not be written to .*transfer\.folder"):
        next(WeightFiles().write(tensors(), tmp_path / "gone"))
    with pytest.raises(ConfigError, match=r"writable folder as transfer\.folder"):
        WeightFiles(str(tmp_path / "gone")).make_folder()


def test_a_file_of_no_size_is_refused():
    with pytest.raises(ConfigError, match=r"file_mib of at least 1, got 0"):
        WeightFiles(file_mib=0)


def test_files_are_in_the_servers_number_format(tmp_path):
    weights = {"a": torch.tensor([1.0, 1.0 / 3.0]), "b": torch.zeros(3)}
    found = {}
    for path in WeightFiles().write(weights.items(), tmp_path, torch.bfloat16):
        found |= load_file(path)
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(found[name], tensor.bfloat16())

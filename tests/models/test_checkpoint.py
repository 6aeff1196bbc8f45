"""Checkpoints of a single process, as files."""

import torch

from trace_pl.models.checkpoint import CheckpointFiles


def test_what_a_killed_process_had_begun_to_write_goes_with_the_next_checkpoint(tmp_path):
    path = tmp_path / "checkpoints" / "last.ckpt"
    files = CheckpointFiles()
    saved = {"model_name": "tiny", "reference_name": "tiny", "metrics": {}, "state_dict": {}}
    files.save_checkpoint(saved, path)
    (path.parent / ".last.ckpt.0digsk3l").write_bytes(b"half")
    other = path.parent / ".other.ckpt.7"  # another file's is not ours
    other.write_bytes(b"half")
    files.save_checkpoint({**saved, "state_dict": {"w": torch.ones(2)}}, path)
    assert sorted(path.parent.iterdir()) == sorted([path, other])
    assert files.load_checkpoint(path)["state_dict"]["w"].tolist() == [1.0, 1.0]

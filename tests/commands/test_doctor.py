"""`trace-pl doctor`: what is wrong is found on real engines, and told with what to change."""

import processes
import pytest
import torch
from cli_runner import run_cli
from random_models import make_qwen3, make_qwen3_moe

from trace_pl.engines import HFEngine

HF = "--data.engine=trace_pl.engines.HFEngine"
SMALL = ("--data.engine.max_model_len=512", "--data.engine.max_num_seqs=4", "--tokens=256")


class StaleEngine(HFEngine):
    """Takes the first push and only says so of the others."""

    def push_weights(self, named_tensors, version):
        if self.version < 0:
            super().push_weights(named_tensors, version)
        self.version = version


def rows(capsys):
    """Return status and finding of each check."""
    table = capsys.readouterr().out.split("\n\n")[0].splitlines()
    return {line[8:34].strip(): (line[:8].strip(), line[34:]) for line in table}


def folder_of(model, folder, tiny_model_dir):
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((tiny_model_dir / name).read_bytes())
    return str(folder)


def test_a_machine_that_fits_passes_every_check(capsys):
    assert run_cli("doctor", HF, *SMALL, "--layers=4") == 0
    found = rows(capsys)
    assert {status for status, _ in found.values()} == {"ok", "-"}
    assert [name for name, (status, _) in found.items() if status == "-"] == ["experts", "ranks"]
    assert "HFEngine" in found["engine starts"][1]
    assert "the model itself" in found["engine starts"][1]
    assert found["weight push"][1].startswith("24 tensors")


def test_an_engine_that_forgets_a_push_is_found_and_the_other_checks_go_on(capsys):
    engine = f"--data.engine={__name__}.StaleEngine"
    assert run_cli("doctor", engine, *SMALL) == 1
    found = rows(capsys)
    failed = {name for name, (status, _) in found.items() if status == "FAILED"}
    assert failed == {"changed weights"}
    assert "parity" in found["changed weights"][1]


def test_parity_beyond_the_runs_tolerance_is_told_with_what_to_change(capsys):
    half = "--data.engine.dtype=bfloat16"
    assert run_cli("doctor", HF, *SMALL, half, "--data.parity_tolerance=1e-3") == 1
    status, told = rows(capsys)["weight push"]
    assert status == "FAILED"
    assert "limits are those of data.parity_tolerance" in told
    assert "number format" in told


def test_an_engine_in_half_precision_passes(capsys):
    assert run_cli("doctor", HF, *SMALL, "--data.engine.dtype=bfloat16") == 0
    assert "parity mean 0.0" in rows(capsys)["weight push"][1]


class HalfStaleEngine(HFEngine):
    """Computes in half precision, and keeps one small weight as it was."""

    def push_weights(self, named_tensors, version):
        kept = self._model.model.layers[1].self_attn.q_norm.weight
        before = kept.clone()
        super().push_weights(named_tensors, version)
        if version > 1:
            with torch.no_grad():
                kept.copy_(before)


def test_a_weight_that_half_precision_hides_is_found_by_itself(capsys):
    engine = f"--data.engine={__name__}.HalfStaleEngine"
    assert run_cli("doctor", engine, *SMALL, "--data.engine.dtype=bfloat16") == 1
    status, told = rows(capsys)["changed weights"]
    assert status == "FAILED"
    assert "1 of 24 weights were not taken: model.layers.1.self_attn.q_norm.weight." in told


def test_an_engine_that_cannot_start_leaves_the_trainers_checks(capsys):
    assert run_cli("doctor", HF, "--data.engine.max_num_seqs=0", "--tokens=256") == 1
    found = rows(capsys)
    assert found["engine starts"][0] == "FAILED"
    assert found["weight push"] == ("-", "the engine did not start")
    assert found["training"][0] == "ok"


@pytest.mark.parametrize(
    ("make", "experts"), [(make_qwen3, "no experts"), (make_qwen3_moe, "2 layers with a router")]
)
def test_a_deep_model_is_examined_by_its_first_layers(
    make, experts, capsys, tmp_path, tiny_model_dir
):
    folder = folder_of(make(num_hidden_layers=5, vocab_size=512), tmp_path / "deep", tiny_model_dir)
    assert run_cli("doctor", HF, *SMALL, f"--model.model_name={folder}", "--layers=2") == 0
    found = rows(capsys)
    assert "2 layers (random weights)" in found["engine starts"][1]
    assert experts in found["experts"][1]


def test_two_ranks_meet_before_and_after_their_engines(capsys):
    processes.start_server()  # the one that has imported everything
    two = ("--trainer.devices=2", "--trainer.accelerator=cpu", "--trainer.strategy=ddp")
    assert run_cli("doctor", HF, *SMALL, *two) == 0
    status, told = rows(capsys)["ranks"]
    assert status == "ok"
    assert told.startswith("2 ranks met before and after an engine each")


def test_a_wrong_setting_of_its_own_is_told(capsys):
    assert run_cli("doctor", "--layers=0") == 2
    assert "at least 1" in capsys.readouterr().err


def test_a_wrong_setting_is_told_before_anything_starts(capsys):
    assert run_cli("doctor", "--data.group_sise=4") == 2
    assert "Did you mean `group_size`?" in capsys.readouterr().err

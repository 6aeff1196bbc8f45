"""A GPU that torch cannot use is never passed by in silence."""

import pytest
import torch
from cli_runner import run_cli

from trace_pl.errors import ConfigError
from trace_pl.training import accelerator
from trace_pl.training.accelerator import driver_of_gpus, require_usable_gpus

OLD = "The NVIDIA driver on your system is too old (found version 12040).\nPlease update."


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Return a function that sets what nvidia-smi prints, and which builds are installed."""

    def make(smi="echo 550.54.14; echo 550.54.14", cuda="13.0", vllm="0.32.0"):
        if smi is not None:
            program = tmp_path / "nvidia-smi"
            program.write_text(f"#!/bin/sh\n{smi}\n")
            program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(accelerator, "vllm_build", lambda: vllm)

        def fail():
            raise RuntimeError(OLD)

        monkeypatch.setattr(torch.cuda, "init", fail)

    return make


@pytest.mark.parametrize("asked", ["auto", "gpu", "cpu"])
def test_a_driver_too_old_for_torch_is_refused_in_one_line(machine, asked):
    machine()
    with pytest.raises(ConfigError) as caught:
        require_usable_gpus(asked)
    line = str(caught.value)
    assert "GPU that nvidia-smi shows (driver 550.54.14), got: The NVIDIA driver on your" in line
    assert "Update the driver to 580 or newer, or `make install ACCELERATOR=cpu`" in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("smi", "cuda", "vllm", "asked"),
    [
        (None, "13.0", "0.32.0", "auto"),  # no driver at all
        ("echo 'No devices were found'; exit 6", "13.0", "0.32.0", "auto"),
        ("exit 9", "13.0", "0.32.0", "auto"),
        ("echo 550.54.14", "13.0", "0.32.0+cpu", "cpu"),  # both sides compute on the CPU
        ("echo 550.54.14", None, "0.32.0+cpu", "cpu"),
    ],
)
def test_where_no_gpu_is_passed_by_a_run_starts_and_nothing_is_said(
    machine, caplog, smi, cuda, vllm, asked
):
    machine(smi, cuda, vllm)
    require_usable_gpus(asked)
    assert not caplog.records


@pytest.mark.parametrize("devices", ["", "-1"])
def test_hidden_devices_are_as_none(machine, monkeypatch, devices):
    machine()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    require_usable_gpus("auto")


def test_builds_for_the_cpu_alone_are_used_with_a_warning(machine, caplog):
    machine("echo 580.65.06", None, "0.32.0+cpu")
    require_usable_gpus("auto")
    assert "torch 2" in caplog.text
    assert "builds for the CPU" in caplog.text


def test_a_torch_for_the_cpu_beside_a_vllm_for_the_gpu_is_refused(machine):
    machine("echo 580.65.06", cuda=None)
    with pytest.raises(ConfigError, match=r"\(driver 580\.65\.06\), got: .*ACCELERATOR=gpu"):
        require_usable_gpus("cpu")


def test_the_driver_is_the_first_that_is_listed(machine):
    machine("echo 580.65.06; echo 580.65.06")
    assert driver_of_gpus() == "580.65.06"
    machine("exit 9")
    assert driver_of_gpus() is None


def test_a_run_is_refused_before_anything_is_built(machine, capsys, monkeypatch, pytestconfig):
    monkeypatch.chdir(pytestconfig.rootpath)
    machine()
    assert run_cli("fit", "--config", "quickstart") == 2
    assert "got: The NVIDIA driver on your system is too old" in capsys.readouterr().err

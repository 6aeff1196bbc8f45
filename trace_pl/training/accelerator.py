"""GPUs that a run would pass by: the driver shows them and torch cannot use them.

torch then says that there is no GPU, and Lightning would train on the CPU without a word; vLLM asks
the driver and takes the GPU.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version

import torch

from trace_pl.errors import ConfigError, one_line

logger = logging.getLogger(__name__)

_LEAST_DRIVERS = {"12": 525, "13": 580}
"""By major version of CUDA, from NVIDIA's table of minor version compatibility."""


def require_usable_gpus(accelerator: str) -> None:
    """Refuse a run for which the driver shows GPUs that torch cannot use.

    CPU builds of torch and vLLM side by side were chosen by somebody, so there is a warning alone,
    and none if the run asks for the CPU.

    Args:
        accelerator: ``trainer.accelerator``.

    Raises:
        ConfigError: with the cause, and what to install.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")
    if hidden or torch.cuda.is_available():
        return
    driver = driver_of_gpus()
    if driver is None:
        return
    is_cpu_vllm = "cpu" in vllm_build()
    if is_cpu_vllm and accelerator == "cpu":
        return
    if is_cpu_vllm and torch.version.cuda is None:
        logger.warning(
            "This machine has an NVIDIA GPU, and torch %s and vLLM are builds for the CPU, which "
            "computes. `make install ACCELERATOR=gpu` takes those for the GPU.",
            torch.__version__,
        )
        return
    raise ConfigError(
        f"Expected torch {torch.__version__} to use the GPU that nvidia-smi shows (driver "
        f"{driver}), got: {_cause()} {_remedy()}, or `make install ACCELERATOR=cpu` to compute on "
        "the CPU."
    )


def driver_of_gpus() -> str | None:
    """Return the version of the NVIDIA driver as nvidia-smi says it; None if it lists no GPU."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.split()
    return lines[0] if done.returncode == 0 and lines else None


def vllm_build() -> str:
    """Return the version of vLLM, that of the CPU build with "cpu" in it, as where there is none.

    The platform that vLLM computes on depends on this name.
    """
    try:
        return version("vllm")
    except PackageNotFoundError:
        return "cpu"


def _remedy() -> str:
    if torch.version.cuda is None:
        return "Run `make install ACCELERATOR=gpu`"
    least = _LEAST_DRIVERS.get(torch.version.cuda.split(".")[0])
    return "Update the driver" + (f" to {least} or newer" if least else "")


def _cause() -> str:
    """Return why torch has no GPU, in its own words."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return one_line(error)
    return "no GPU."

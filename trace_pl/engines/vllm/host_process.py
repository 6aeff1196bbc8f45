"""Keeping a guest engine from changing the process that it shares with the trainer."""

from __future__ import annotations

import os
import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import torch

from trace_pl.errors import TraceError

set_num_threads: Callable[[int], None] = torch.set_num_threads
"""The real function: vLLM's CPU worker replaces torch's own by one that does nothing."""


@contextmanager
def kept_state() -> Iterator[None]:
    """Undo what starting vLLM does to random states and to ``torch.set_num_threads``."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    num_threads = torch.get_num_threads()
    try:
        gpus = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(gpus):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_num_threads = set_num_threads  # type: ignore[assignment]
        set_num_threads(num_threads)


@contextmanager
def quiet_output(is_quiet: bool) -> Iterator[None]:
    """Hide what native code and imports print.

    If they fail unexpectedly it goes to stderr after all; errors of trace_pl speak for themselves.

    Args:
        is_quiet: whether to hide anything at all.
    """
    if not is_quiet:
        yield
        return
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryFile() as sink, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved = [os.dup(1), os.dup(2)]
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
        is_worth_showing = True
        try:
            yield
            is_worth_showing = False
        except TraceError:
            is_worth_showing = False
            raise
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, copy in zip((1, 2), saved, strict=True):
                os.dup2(copy, number)
                os.close(copy)
            if is_worth_showing:
                sink.seek(0)
                os.write(2, sink.read()[-20_000:])


@contextmanager
def guest_compute(num_threads: int | None, is_eager: bool) -> Iterator[None]:
    """Lend the process to the engine for one step.

    Args:
        num_threads: CPU threads for the guest; None leaves the trainer's number.
        is_eager: whether functions marked for ``torch.compile`` run uncompiled. vLLM compiles a
            one-line function that ranks log-probs, which costs a fresh CPU process 20 s.
    """
    trainer_threads = torch.get_num_threads()
    random_state = torch.get_rng_state()
    if num_threads is not None:
        set_num_threads(num_threads)
    try:
        with torch.compiler.set_stance("force_eager") if is_eager else nullcontext():
            yield
    finally:
        torch.set_rng_state(random_state)
        if num_threads is not None:
            set_num_threads(trainer_threads)

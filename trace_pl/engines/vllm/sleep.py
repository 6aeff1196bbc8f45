"""Lending vLLM's device memory to the trainer between two rollout phases."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trace_pl.errors import RolloutError

logger = logging.getLogger(__name__)

_DISCARD = 2  # vLLM's level that keeps no copy of the weights: a push comes before their next use


class Sleeper:
    """Puts one engine to sleep and wakes it around a weight push.

    Untried on a GPU: on CPU vLLM cannot sleep, so only the order of the calls is tested.

    Args:
        engine: vLLM's engine, started with sleep mode enabled.
    """

    def __init__(self, engine: Any) -> None:  # noqa: ANN401  (vLLM is not imported here)
        self._engine = engine

    def sleep(self) -> None:
        """Free weights and cache; does nothing if asleep.

        Raises:
            RolloutError: if that frees no memory.
        """
        if self._engine.is_sleeping():
            return
        before = free_bytes()
        self._engine.sleep(level=_DISCARD)
        freed = free_bytes() - before
        if freed <= 0:
            raise RolloutError(
                f"vLLM freed no memory when it went to sleep ({freed} bytes). Set "
                "`data.engine.init_args.sleep_while_training` to false."
            )
        logger.info("vLLM sleeps and frees %.2f GiB.", freed / 2**30)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Wake the weights for the block, in which they are pushed, and the cache after it.

        In this order the pushed tensors and the cache never need memory at the same time.
        """
        if not self._engine.is_sleeping():
            yield
            return
        torch.cuda.empty_cache()  # what training no longer uses is still held for it
        self._engine.wake_up(tags=["weights"])
        yield
        self._engine.wake_up(tags=["kv_cache"])


def free_bytes() -> int:
    """Return the free memory of the current GPU."""
    return torch.cuda.mem_get_info()[0]

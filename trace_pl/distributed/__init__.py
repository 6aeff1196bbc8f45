"""Several ranks: strategies of the Trainer, and what ranks do together."""

from trace_pl.distributed.strategy import ShardedStrategy

__all__ = [
    "ShardedStrategy",
]

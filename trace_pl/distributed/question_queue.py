"""Which rank asks which question: each takes the next one when it has room."""

from __future__ import annotations

import time
from itertools import count

from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from trace_pl.distributed.leader import has_other_ranks, num_ranks
from trace_pl.privates import default_store

_NUMBERS = count()  # of the queues that ranks share, which all make theirs in the same order
_TAKEN, _USABLE, _LEFT = _KEYS = ("taken", "usable", "left")
_LOOK_S = 0.2  # between looks at what other ranks have done, each a message to the store


class QuestionQueue:
    """The questions of one phase, in order; whoever has room takes the next.

    Trajectories differ in length by an order of magnitude, so ranks with equal numbers of questions
    would wait for each other. The queue is a counter in a store: in that of the process group, so
    that it works wherever ranks have met, also from a thread beside the training.

    Args:
        num_questions: How many there are.
        store: Holds the counters of this phase alone; None means that nobody shares them.
        num_ranks: Processes that take from it.
        enough: Usable groups, of all ranks together, at which the phase ends; None asks everything.
    """

    def __init__(
        self,
        num_questions: int,
        store: Store | None = None,
        num_ranks: int = 1,
        enough: int | None = None,
    ) -> None:
        self.num_questions = num_questions
        self.num_ranks = num_ranks
        self.enough = enough
        self._store = store or HashStore()
        self._is_empty = False
        self._has_enough = False
        self._next_look = 0.0

    @classmethod
    def of_all_ranks(cls, num_questions: int, enough: int | None = None) -> QuestionQueue:
        """Return the queue that all ranks share, when each of them calls this."""
        if not has_other_ranks():
            return cls(num_questions, enough=enough)
        store = PrefixStore(f"questions-{next(_NUMBERS)}", default_store())
        return cls(num_questions, store, num_ranks(), enough)

    @property
    def fair_share(self) -> int:
        """Questions that a rank may hold unanswered, so that the first does not take them all."""
        return -(-self.num_questions // self.num_ranks)

    def take(self) -> int | None:
        """Return the position of the next question, which is then this rank's; None at the end."""
        if self._is_empty:
            return None
        position = self._store.add(_TAKEN, 1) - 1
        self._is_empty = position >= self.num_questions
        return None if self._is_empty else position

    def count(self) -> bool:
        """Count a group that is complete and usable; False if there were enough without it."""
        number = self._store.add(_USABLE, 1)
        self._has_enough = self.enough is not None and number >= self.enough
        return self.enough is None or number <= self.enough

    def has_enough(self) -> bool:
        """Return whether all ranks together have as many usable groups as are wanted."""
        now = time.monotonic()
        if self.enough is not None and not self._has_enough and now >= self._next_look:
            self._next_look = now + _LOOK_S
            self._has_enough = self._store.add(_USABLE, 0) >= self.enough
        return self._has_enough

    def close(self) -> None:
        """Take nothing any more; the last rank to do so clears the store."""
        self._is_empty = True
        if self._store.add(_LEFT, 1) == self.num_ranks:
            for key in _KEYS:
                self._store.delete_key(key)

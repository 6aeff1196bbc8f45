"""Reuses scores that are known already: of equal prefixes, and of an epoch that is replayed.

A score depends on the tokens of the prefix, the branches and the model alone. The rollouts of a
group share at least their prompt and often their first turns, so a part of every call is asked for
twice; and an epoch that was killed is collected again from the same weights and seeds.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trace_pl.errors import ConfigError
from trace_pl.probes import ProbeRequest, Scorer


class ScoreStore:
    """Scores by key, in memory or in a file that survives the process.

    Args:
        path: SQLite file, made if missing; None keeps everything in memory.

    Raises:
        ConfigError: if the file is no store.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        try:
            self._database = sqlite3.connect(path or ":memory:")
            with self._database:
                self._database.execute(
                    "CREATE TABLE IF NOT EXISTS scores (key BLOB PRIMARY KEY, score BLOB NOT NULL)"
                )
        except sqlite3.Error as error:
            raise ConfigError(
                f"Expected a store of scores at '{path}', got: {error}. Delete the file; it holds "
                "nothing that cannot be computed again."
            ) from error

    def read(self, keys: Iterable[bytes]) -> dict[bytes, Tensor]:
        """Return the known scores among ``keys``, (A,) float32 each."""
        query = "SELECT score FROM scores WHERE key = ?"
        found: dict[bytes, Tensor] = {}
        for key in set(keys):
            row = self._database.execute(query, (key,)).fetchone()
            if row is not None:
                found[key] = torch.from_numpy(np.frombuffer(row[0], "<f4").astype(np.float32))
        return found

    def write(self, scores: Mapping[bytes, Tensor]) -> None:
        """Add scores, all or none."""
        rows = [(key, score.numpy().astype("<f4").tobytes()) for key, score in scores.items()]
        with self._database:
            self._database.executemany("INSERT OR REPLACE INTO scores VALUES (?, ?)", rows)

    def close(self) -> None:
        """Close the file."""
        self._database.close()


class CachedScorer:
    """Asks another scorer only for what was not scored before.

    Args:
        scorer: gives the missing scores.
        store: holds the others; it must be of the same model.
        model_name: part of every key, so that a file does not serve another model.
    """

    def __init__(self, scorer: Scorer, store: ScoreStore, model_name: str = "") -> None:
        self.scorer = scorer
        self.store = store
        self.model_name = model_name
        self.num_asked = 0
        """Boundaries that were asked for so far."""
        self.num_scored = 0
        """Boundaries that the other scorer had to score."""

    @property
    def is_reused(self) -> Tensor:
        """Bool, for each boundary asked for (in no order) whether its score was known already."""
        return torch.arange(self.num_asked) >= self.num_scored

    def score(self, requests: Sequence[ProbeRequest]) -> list[Tensor]:
        """Return the mean log-prob of each answer after each prefix; see ``Scorer.score``."""
        keys = [self._keys(request) for request in requests]
        known = self.store.read(key for each in keys for key in each)
        claimed = set(known)
        missing: list[ProbeRequest] = []
        places: list[list[bytes]] = []
        for request, each in zip(requests, keys, strict=True):
            wanted = [k for k, key in enumerate(each) if key not in claimed]
            if wanted:
                ends = tuple(request.prefix_ends[k] for k in wanted)
                missing.append(replace(request, prefix_ends=ends))
                places.append([each[k] for k in wanted])
                claimed.update(places[-1])
        fresh = {
            key: score
            for each, scores in zip(places, self.scorer.score(missing), strict=True)
            for key, score in zip(each, scores, strict=True)
        }
        self.store.write(fresh)
        self.num_asked += sum(len(each) for each in keys)
        self.num_scored += len(fresh)
        known.update(fresh)
        return [torch.stack([known[key] for key in each]) for each in keys]

    def _keys(self, request: ProbeRequest) -> list[bytes]:
        """Return a digest of each prefix, together with the branches and the model's name."""
        digest = blake2b(repr((self.model_name, request.branches)).encode(), digest_size=16)
        keys: list[bytes] = []
        start = 0
        for end in request.prefix_ends:
            digest.update(request.token_ids[start:end].numpy().tobytes())
            keys.append(digest.digest())
            start = end
        return keys

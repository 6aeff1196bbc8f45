"""A seeded closed web of invented entities: every page states three facts that lead to other pages.

Five kinds of entity form five layers. Each entity has three relations into the next layer, so a
question of h hops is a chain of h relations, and its evidence is exactly the h pages along it.
Names run in families: a name ends with the words of the family of whatever leads to it, and adds
one of its own. Each true page therefore narrows the answer down by one word, but its first word
stands on the last page alone, so nothing but opening the pages answers a question.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from trace_pl.errors import ConfigError
from trace_pl.tools.corpus import Document
from trace_pl.types import Question

KINDS = ("town", "company", "person", "ship", "port")
RELATIONS: dict[str, tuple[str, str, str]] = {
    "town": ("hosting", "funding", "taxing"),
    "company": ("employing", "honouring", "suing"),
    "person": ("sailing", "painting", "repairing"),
    "ship": ("visiting", "supplying", "charting"),
}
_REMARKS = (
    "It is well known in the north.",
    "It is rarely mentioned in older records.",
    "It was described at length in an almanac.",
    "It has changed little over the years.",
    "It is often confused with others of that name.",
    "It was restored not long ago.",
)
_ONSETS = ("b", "d", "f", "g", "h", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z")
_VOWELS = ("a", "e", "i", "o", "u")
_CODAS = ("k", "l", "m", "n", "r", "s", "t")

SPLIT_SHARES = {"base": 0.50, "train": 0.35, "validation": 0.05, "test": 0.10}
"""Share of all chains in each disjoint split; ``base`` is what the base model was trained on."""


@dataclass(frozen=True, slots=True)
class Entity:
    """One page of the web."""

    id: str
    name: str
    kind: str
    facts: tuple[tuple[str, str], ...]
    """(relation, id of the entity it leads to), in the order the page states them."""
    remark: str


@dataclass(frozen=True, slots=True)
class Chain:
    """A question in structured form: start entity, relations, and the entities on the way."""

    relations: tuple[str, ...]
    path: tuple[str, ...]
    """Entity ids from start to answer, one more than there are relations."""

    @property
    def hops(self) -> int:
        """Number of relations to follow."""
        return len(self.relations)


def invented_words(count: int, syllables: int, rng: random.Random) -> list[str]:
    """Return ``count`` distinct capitalised invented words."""
    words: set[str] = set()
    while len(words) < count:
        body = "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(syllables))
        words.add((body + rng.choice(_CODAS)).capitalize())
    return sorted(words)


@dataclass(frozen=True)
class ClosedWeb:
    """The whole web, a pure function of its seed.

    The entities of layer l belong to 3^l families; those of one family lead to its three child
    families, one by each relation.

    Args:
        seed: Names the web. Words come from ``word_seed``, links and names from ``seed``; webs that
            share ``word_seed`` share a vocabulary, so a model of many has to read, not recall.
        last_family_size: Entities in each of the 81 families of the last layer; every layer has
            81 times as many.
        word_seed: Seed of the word pools.
    """

    seed: int = 0
    last_family_size: int = 2
    word_seed: int = 7

    def __post_init__(self) -> None:
        if not 1 <= self.last_family_size <= 2:
            raise ConfigError(
                "Expected last_family_size of 1 or 2 for the closed web, got "
                f"{self.last_family_size}."
            )

    @property
    def entities_per_kind(self) -> int:
        """Pages in each of the five layers."""
        return int(3 ** (len(KINDS) - 1)) * self.last_family_size

    @cached_property
    def words(self) -> tuple[list[str], list[str], list[str]]:
        """First words of all names, last words of towns, words of families."""
        rng = random.Random(self.word_seed)
        num_families = sum(3**layer for layer in range(1, len(KINDS)))
        pool = invented_words(60 + 12 + num_families, 2, rng)
        rng.shuffle(pool)
        return pool[:60], pool[60:72], pool[72:]

    @cached_property
    def entities(self) -> dict[str, Entity]:
        """Every entity by id."""
        rng = random.Random(f"closed-web-{self.seed}")
        count = self.entities_per_kind
        names = self._names(rng)
        numbers = rng.sample(range(1000, 10_000), count * len(KINDS))
        ids = {kind: [f"page-{numbers.pop()}" for _ in range(count)] for kind in KINDS}
        entities: dict[str, Entity] = {}
        for layer, kind in enumerate(KINDS):
            for number, id_ in enumerate(ids[kind]):
                relations = list(RELATIONS.get(kind, ()))
                rng.shuffle(relations)
                facts = []
                for branch, relation in enumerate(relations):
                    family = number % 3**layer + branch * 3**layer
                    target = rng.randrange(family, count, 3 ** (layer + 1))
                    facts.append((relation, ids[KINDS[layer + 1]][target]))
                rng.shuffle(facts)
                entities[id_] = Entity(
                    id_, names[kind][number], kind, tuple(facts), rng.choice(_REMARKS)
                )
        return entities

    def _names(self, rng: random.Random) -> dict[str, list[str]]:
        """Return the names of each layer; entity n of layer l is of family n mod 3^l."""
        first, towns, families = self.words
        count = self.entities_per_kind
        names = {KINDS[0]: [f"{a} {b}" for a, b in rng.sample([*product(first, towns)], count)]}
        unused = rng.sample(families, len(families))
        lineages = [""]
        for layer, kind in enumerate(KINDS[1:], start=1):
            # Family f descends from family f mod 3^(l-1) and puts its own word before the others.
            lineages = [
                f" {unused.pop()}{lineages[family % len(lineages)]}" for family in range(3**layer)
            ]
            firsts = [rng.sample(first, count // len(lineages)) for _ in lineages]
            names[kind] = [
                firsts[n % len(lineages)][n // len(lineages)] + lineages[n % len(lineages)]
                for n in range(count)
            ]
        return names

    def documents(self) -> list[Document]:
        """Render every entity as a page of plain English."""
        return [Document(e.id, e.name, self.page_text(e)) for e in self.entities.values()]

    def page_text(self, entity: Entity) -> str:
        """Render one page: what it is, its facts, a remark."""
        text = f"{entity.name} is a {entity.kind}."
        if entity.facts:
            *most, final = [f"{rel} {self.entities[id_].name}" for rel, id_ in entity.facts]
            text += f" It is {', '.join(most)} and {final}."
        return f"{text} {entity.remark}"

    def chains(self, hops: int, split: str) -> list[Chain]:
        """Return the chains of ``hops`` relations that belong to ``split``, in a seeded order.

        Raises:
            ConfigError: if the split is unknown or no chain can be that long.
        """
        if split not in SPLIT_SHARES or not 1 <= hops < len(KINDS):
            raise ConfigError(
                f"Expected a split of {sorted(SPLIT_SHARES)} and 1 to {len(KINDS) - 1} hops, got "
                f"'{split}' and {hops}."
            )
        chains = [
            chain
            for entity in self.entities.values()
            if KINDS.index(entity.kind) + hops < len(KINDS)
            for chain in self._chains_from(entity, hops)
        ]
        random.Random(f"chains-{self.seed}-{hops}").shuffle(chains)
        start = 0.0
        for name, share in SPLIT_SHARES.items():
            if name == split:
                return chains[round(start * len(chains)) : round((start + share) * len(chains))]
            start += share
        raise AssertionError(split)

    def _chains_from(self, entity: Entity, hops: int) -> list[Chain]:
        paths: list[Chain] = [Chain((), (entity.id,))]
        for _ in range(hops):
            paths = [
                Chain((*c.relations, rel), (*c.path, target))
                for c in paths
                for rel, target in self.entities[c.path[-1]].facts
            ]
        return paths

    def question(self, chain: Chain) -> Question:
        """Put a chain into words."""
        start, answer = self.entities[chain.path[0]], self.entities[chain.path[-1]]
        kinds = [self.entities[id_].kind for id_ in chain.path]
        steps = [f" {rel} a {kind}" for rel, kind in zip(chain.relations, kinds[1:], strict=True)]
        return Question(
            id=f"{start.id}-{'-'.join(chain.relations)}",
            text=f"{start.name} is a {start.kind}{''.join(steps)}. Which {answer.kind}?",
            answers=(answer.name,),
            meta={"hops": chain.hops, "evidence": chain.path[:-1], "source": f"web-{self.seed}"},
        )

    def questions(self, hops: tuple[int, ...], split: str) -> list[Question]:
        """Return all questions of these hop counts in a split, mixed in a seeded order."""
        found = [self.question(c) for h in hops for c in self.chains(h, split)]
        random.Random(f"mix-{self.seed}-{split}").shuffle(found)
        return found

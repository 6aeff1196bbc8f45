"""Dealing rows of different lengths to forwards of about equal size."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def balanced_bins(costs: Sequence[int], count: int) -> list[list[int]]:
    """Deal items to bins so that the fullest holds little more than the others.

    The longest item goes first, each to the bin that is emptiest so far: at most 4/3 of the best
    possible maximum (Graham, 1969).

    Args:
        costs: Size of each item, e.g. its tokens.
        count: Number of bins.

    Returns:
        ``count`` lists of indices into ``costs``; some are empty if there are fewer items.
    """
    bins: list[list[int]] = [[] for _ in range(count)]
    fill = [(0, number) for number in range(count)]
    for index in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):
        total, number = heapq.heappop(fill)
        bins[number].append(index)
        heapq.heappush(fill, (total + costs[index], number))
    return bins


def bins_within(costs: Sequence[int], budget: int, multiple: int = 1) -> list[list[int]]:
    """Deal items to as few balanced bins as keep within a budget.

    Args:
        costs: Size of each item.
        budget: Largest sum of a bin. An item above it gets a bin of its own.
        multiple: The number of bins is one of this, as far as there are items for them.

    Returns:
        Lists of indices into ``costs``, none of them empty.
    """
    count = -(-sum(costs) // (budget * multiple)) * multiple
    while True:
        bins = balanced_bins(costs, count)
        if all(len(b) < 2 or sum(costs[i] for i in b) <= budget for b in bins):
            return [b for b in bins if b]
        count += multiple

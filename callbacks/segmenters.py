"""Where a rollout is cut into turns."""

from __future__ import annotations

from trace_pl.credit.boundaries import tool_call_boundaries
from trace_pl.credit.stages import Segmenter
from trace_pl.types import Boundaries, Rollout


class ToolCallSegmenter(Segmenter):
    """One turn is one tool call: a boundary after the prompt and after each observation."""

    def segment(self, rollout: Rollout) -> Boundaries:
        """Return :func:`trace_pl.credit.boundaries.tool_call_boundaries` of ``rollout``."""
        return tool_call_boundaries(rollout)

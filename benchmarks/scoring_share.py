"""What TRACE's scoring adds to a GRPO step: the quickstart's own phases.

    python benchmarks/scoring_share.py --epochs 5

Credit covers segmenting, scoring, backup and anchoring; without turn credit it takes no time.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from phases import run_phases


def main() -> None:
    """Train for some epochs and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5, help="measured ones")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--hops", type=int, default=3)
    sizes = parser.parse_args()
    settings = {
        "trainer.max_epochs": sizes.epochs + 1,
        "data.task.init_args.hops": f"[{sizes.hops}]",
    }
    with tempfile.TemporaryDirectory() as folder:
        found = run_phases(Path(folder), settings, sizes.threads)
    rest = found["rollout"] + found["update"]
    print(
        json.dumps(
            {
                "name": "scoring_share",
                "ratio": round(found["credit"] / rest, 3),
                "of_rollout": round(found["credit"] / found["rollout"], 3),
                "of_update": round(found["credit"] / found["update"], 3),
                "tokens_per_rollout": round(found["tokens"], 1),
                **vars(sizes),
            }
        )
    )


if __name__ == "__main__":
    main()

"""Does turn credit single out the turns that found true evidence?

Samples rollouts of the base policy on the training questions of a config, probes every tool
boundary, and prints for each value transform and each K the area under the ROC curve with which a
turn's credit tells the turns that first opened a page of the question's evidence from the others:
from all of them, and from those that opened some other page. 0.5 is chance. With ``--pretrained``
the same trajectories are also read by another model.

    python benchmarks/credit_validity.py --config configs/quickstart.yaml --questions 512

Further arguments are passed to the config, e.g. ``--data.task.init_args.hops "[4]"``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import pairwise

import torch
from torchmetrics.functional.classification import binary_auroc
from transformers import PreTrainedTokenizerBase

from trace_pl.commands.cli import TraceCLI
from trace_pl.credit.boundaries import tool_call_boundaries
from trace_pl.credit.td import k_step_backup
from trace_pl.credit.values import LinearGapValue, LogRatioValue, RawLogprobValue
from trace_pl.models.loading import load_model, load_reference, load_tokenizer
from trace_pl.probes import Branch, ProbeRequest
from trace_pl.scoring import BranchedScorer
from trace_pl.training.datamodule import RolloutDataModule
from trace_pl.training.module import TraceModule
from trace_pl.types import Rollout

TRANSFORMS = {
    "log ratio": LogRatioValue(),
    "linear gap": LinearGapValue(),
    "raw delta": RawLogprobValue(),
}
STEPS = (1, 3, 5, 7)


def evidence_turns(rollout: Rollout) -> list[bool]:
    """Return for each turn whether it opened a page of the evidence for the first time."""
    missing = set(rollout.question.meta["evidence"])
    found = []
    for turn in rollout.turns:
        shown = missing & set(turn.result.docids) if turn.call.name.endswith("open") else set()
        missing -= shown
        found.append(bool(shown))
    return found


def own_requests(rollouts: Sequence[Rollout], data: RolloutDataModule) -> list[ProbeRequest]:
    """Ask the policy's own reference, as training does."""
    return [
        ProbeRequest(
            rollout.id,
            rollout.token_ids,
            tool_call_boundaries(rollout).prefix_ends,
            (data.template.render(data.template.answer_opening, rollout.question.answers[0]),),
        )
        for rollout in rollouts
    ]


def foreign_requests(
    rollouts: Sequence[Rollout], data: RolloutDataModule, tokenizer: PreTrainedTokenizerBase
) -> list[ProbeRequest]:
    """Ask a model with another ChatML tokenizer: the same text, encoded boundary by boundary."""

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    requests = []
    for rollout in rollouts:
        ids: list[int] = []
        ends = []
        for start, stop in pairwise((0, *tool_call_boundaries(rollout).prefix_ends)):
            ids += encode(data.template.decode(rollout.token_ids[start:stop].tolist()))
            ends.append(len(ids))
        opening = encode("<|im_start|>assistant\nThe answer is")
        branch = Branch(tuple(opening), tuple(encode(f" {rollout.question.answers[0]}")))
        requests.append(ProbeRequest(rollout.id, torch.tensor(ids), tuple(ends), (branch,)))
    return requests


def separation(
    mean_logprobs: Sequence[torch.Tensor], rollouts: Sequence[Rollout]
) -> dict[str, dict[str, list[float]]]:
    """Return the area under the ROC curve, among all turns and among page openings."""
    target = torch.tensor([label for r in rollouts for label in evidence_turns(r)]).long()
    opens = torch.tensor([turn.call.name.endswith("open") for r in rollouts for turn in r.turns])
    table: dict[str, dict[str, list[float]]] = {}
    for name, transform in TRANSFORMS.items():
        values = [transform(logprobs) for logprobs in mean_logprobs]
        table[name] = {}
        for steps in STEPS:
            credit = torch.cat([k_step_backup(v, steps) for v in values])
            # Into 0 .. 1, or the function would squash it; only the order counts.
            scaled = 0.5 + credit / (2.0 * credit.abs().max())
            table[name][f"K={steps}"] = [
                round(float(binary_auroc(scaled, target)), 4),
                round(float(binary_auroc(scaled[opens], target[opens])), 4),
            ]
    return table


def main() -> None:
    """Sample, probe, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="configs/quickstart.yaml")
    parser.add_argument("--questions", type=int, default=512)
    parser.add_argument("--pretrained", help="folder of another causal model with ChatML tokens")
    arguments, overrides = parser.parse_known_args()
    cli = TraceCLI(
        TraceModule,
        RolloutDataModule,
        run=False,
        args=["--config", arguments.config, "--trainer.logger=false", *overrides],
        auto_configure_optimizers=False,
        save_config_callback=None,
    )
    data, module = cli.datamodule, cli.model
    data.open()
    questions = data.agent.task.questions("train")[: arguments.questions]
    groups = data.collector.loop.collect(questions, 1)
    rollouts = [r for group in groups for r in group.rollouts if r.num_turns]
    labels = [evidence_turns(rollout) for rollout in rollouts]
    readers = {
        "reference": (
            load_reference(module.reference_name, module.model_name),
            own_requests(rollouts, data),
        )
    }
    if arguments.pretrained:
        tokenizer = load_tokenizer(arguments.pretrained)
        model = load_model(arguments.pretrained).eval()
        readers["pretrained"] = (model, foreign_requests(rollouts, data, tokenizer))
    found = {}
    with torch.no_grad():
        for name, (model, requests) in readers.items():
            scores = BranchedScorer(model).score(requests)
            found[name] = separation([score[:, 0] for score in scores], rollouts)
    data.teardown("validate")
    print(
        json.dumps(
            {
                "name": "credit_validity",
                "ratio": found["reference"]["log ratio"]["K=1"][0],
                "rollouts": len(rollouts),
                "turns": sum(map(len, labels)),
                "evidence_turns": sum(map(sum, labels)),
                "auc": found,
            }
        )
    )


if __name__ == "__main__":
    main()

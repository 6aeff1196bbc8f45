r"""A whole RL step (rollouts, credit, update) beside TRL's GRPOTrainer, on the same machine.

Both train the same random model on the same prompts with the same group size, one optimizer step
for each batch of rollouts, in float32 on the CPU; every rollout is one response of up to the given
number of tokens, for TRL's agent loop and ours differ in what a tool call is. Each side runs in a
process of its own. Ours samples with vLLM, TRL with transformers' generate: its vLLM mode asks for
a GPU. The first step of both is left out.

    pip install trl datasets
    python benchmarks/rl_step.py --steps 3 --response-tokens 256
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import statistics
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from phases import PHASES, run_phases
from transformers import AutoConfig, AutoModelForCausalLM

from trace_pl.models.loading import load_tokenizer
from trace_pl.models.names import BUILT_IN_BASE, resolve_model
from trace_pl.rollout.chat.template import ChatTemplate
from trace_pl.tasks.closed_web.task import ClosedWebTask

GROUP_SIZE = 8


def make_model(folder: Path) -> None:
    """Save a random model of the built-in base's size with its tokenizer."""
    base = Path(resolve_model(BUILT_IN_BASE))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base))
    model.save_pretrained(folder)
    load_tokenizer(BUILT_IN_BASE).save_pretrained(folder)


def run_ours(folder: Path, sizes: argparse.Namespace) -> dict[str, Any]:
    """Return seconds of each phase, and tokens of a rollout."""
    settings = {
        "model.model_name": folder / "model",
        "trainer.max_epochs": sizes.steps + 1,
        "data.num_steps": 1,
        "data.questions_per_epoch": sizes.questions,
        "data.group_size": GROUP_SIZE,
        "data.limits.max_response_tokens": sizes.response_tokens,
        "data.tokens_per_forward": sizes.tokens_per_forward,
    }
    found = run_phases(folder, settings, sizes.threads)
    return {"phases": {name: found[name] for name in PHASES}, "tokens": found["tokens"]}


def trl_settings(folder: Path, sizes: argparse.Namespace) -> Any:  # noqa: ANN401  (TRL is optional)
    """Return TRL's settings for the same step."""
    from trl import GRPOConfig

    rollouts = sizes.questions * GROUP_SIZE
    # As many forwards of an update as we need, of equal rows: TRL pads and has no token budget.
    forwards = -(-rollouts * (sizes.response_tokens + 40) // sizes.tokens_per_forward)
    while rollouts % forwards:
        forwards += 1
    return GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=rollouts // forwards,
        gradient_accumulation_steps=forwards,
        num_generations=GROUP_SIZE,
        max_completion_length=sizes.response_tokens,
        max_steps=sizes.steps + 1,
        learning_rate=5e-4,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        disable_tqdm=True,
    )


def run_trl(folder: Path, sizes: argparse.Namespace) -> dict[str, Any]:
    """Return seconds of each phase, and tokens of a rollout."""
    import trl
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    torch.set_num_threads(sizes.threads)
    task, tokenizer = ClosedWebTask(hops=[3]), load_tokenizer(str(folder / "model"))
    template = ChatTemplate(tokenizer, task.toolbox().schemas())
    prompts = [
        template.prompt_ids("", question.text) + template.generation_header
        for question in task.questions("train")[: sizes.questions * (sizes.steps + 1)]
    ]
    texts = [template.decode(ids) for ids in prompts]
    steps: list[float] = []
    generation: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *arguments: object, **named: object) -> None:
            steps.append(perf_counter())

        def on_step_end(self, *arguments: object, **named: object) -> None:
            steps[-1] = perf_counter() - steps[-1]

    trainer = GRPOTrainer(
        model=str(folder / "model"),
        args=trl_settings(folder, sizes),
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": texts}),
        reward_funcs=lambda completions, **named: [0.0] * len(completions),
        callbacks=[Clock()],
    )
    generate = trainer._generate_and_score_completions

    def timed(*arguments: object) -> object:
        start = perf_counter()
        found = generate(*arguments)
        generation.append(perf_counter() - start)
        return found

    trainer._generate_and_score_completions = timed
    trainer.train()
    rollout = statistics.fmean(generation[1:])
    lengths = [row["completions/mean_length"] for row in trainer.state.log_history[1:-1]]
    return {
        "phases": {"rollout": rollout, "update": statistics.fmean(steps[1:]) - rollout},
        "tokens": statistics.fmean(lengths) + statistics.fmean(len(ids) for ids in prompts),
        "version": trl.__version__,
    }


def main() -> None:
    """Run both sides and print one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=3, help="measured steps")
    parser.add_argument("--questions", type=int, default=16, help="prompts of each step")
    parser.add_argument("--response-tokens", type=int, default=256)
    parser.add_argument("--tokens-per-forward", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=1)
    sizes = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    make_model(folder / "model")
    found = {"ours": run_ours(folder, sizes)}
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found["trl"] = pool.apply(run_trl, (folder, sizes))
    shutil.rmtree(folder)
    seconds = {name: sum(side["phases"].values()) for name, side in found.items()}
    print(
        json.dumps(
            {
                "name": "rl_step",
                "ratio": round(seconds["trl"] / seconds["ours"], 2),
                "shares": {
                    name: {k: round(v / seconds[name], 3) for k, v in side["phases"].items()}
                    for name, side in found.items()
                },
                "rollout_ratio": round(
                    found["trl"]["phases"]["rollout"] / found["ours"]["phases"]["rollout"], 2
                ),
                "update_ratio": round(
                    found["trl"]["phases"]["update"] / found["ours"]["phases"]["update"], 2
                ),
                "tokens_per_rollout": {k: round(v["tokens"], 1) for k, v in found.items()},
                "trl": found["trl"]["version"],
                **vars(sizes),
            }
        )
    )


if __name__ == "__main__":
    main()

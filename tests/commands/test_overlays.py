"""Every file that is laid over a run, over every complete run: it changes what it names alone."""

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name

import pytest
import yaml
from jsonargparse import ArgumentParser, Namespace
from parsed import CONFIGS, RUNS, parsed

from trace_pl.commands.plan.from_config import run_from_config
from trace_pl.commands.plan.inputs import Assumptions
from trace_pl.commands.plan.memory import memory_of
from trace_pl.commands.plan.remedies import remedies
from trace_pl.credit.pipeline import reader_of
from trace_pl.training.module import TraceModule

OVERLAYS = sorted(
    path
    for folder in ("ablations", "methods", "options", "strategy")
    for path in (CONFIGS / folder).iterdir()
)
ABLATIONS = [path for path in OVERLAYS if path.parent.name == "ablations"]
MEETS = {"ablations": ("quickstart", "qwen3_4b"), "methods": ("quickstart",)}
"""The runs that a folder's files are laid over here; options and strategies meet every run."""
MIXTURE = "Qwen/Qwen3-30B-A3B-Thinking-2507"
NO_REFERENCE = {
    "grpo", "dr_grpo", "rloo", "gspo", "gigpo", "no_prober", "policy_prober", "lora", "evidence",
    "grpo_f1", "igpo", "delta_belief", "a2tgpo", "rlpr",
}  # fmt: skip
NUM_STEPS = {"clip_higher": 4, "gspo": 4, "sequence_clip": 4, "importance_weights": 1}
"""What an ablation of the loss acts on: ratios that left 1, or rows that are on-policy."""

every_run = pytest.mark.parametrize("run", RUNS, ids=lambda path: path.stem)


@cache
def module_parser():
    found = ArgumentParser()
    found.add_class_arguments(TraceModule, "model")
    return found


def resolved(*arguments: str) -> dict:
    found = parsed(*arguments).as_dict()
    del found["config"]
    return found


def flat(tree, prefix=""):
    """Return {dotted key: value} of every leaf."""
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree}
    return {
        key: value
        for name, part in tree.items()
        for key, value in flat(part, f"{prefix}.{name}".strip(".")).items()
    }


def is_named(key, names, before, after):
    """Whether a file names a key, what it is part of, or the class that has or had it."""
    if any(f"{key}.".startswith(f"{name}.") or name.startswith(f"{key}.") for name in names):
        return True
    owner = key.split(".init_args")[0] if ".init_args" in key else key.rpartition(".")[0]
    is_made_anew = f"{owner}.class_path" in names or before.get(owner, ...) is None
    return is_made_anew and (key in before) != (key in after)


def unnamed_changes(path, base, changed):
    names = flat(yaml.safe_load(path.read_text()))
    before, after = flat(base), flat(changed)
    differing = {k for k in before.keys() | after.keys() if before.get(k, ...) != after.get(k, ...)}
    assert all(after[key] == value for key, value in names.items())
    return {key for key in differing if not is_named(key, names, before, after)}


@pytest.mark.parametrize(
    ("run", "path"),
    [
        pytest.param(run, path, id=f"{run.stem}-{path.stem}")
        for run in RUNS
        for path in OVERLAYS
        if run.stem in MEETS.get(path.parent.name, (run.stem,))
    ],
)
def test_an_overlay_changes_what_it_names_alone_and_leaves_a_run_that_fits_together(
    run, path, tmp_path, monkeypatch
):
    if path.stem == "adamw_8bit":
        pytest.importorskip("torchao")
    arguments = (f"--config={run}", f"--config={path}")
    changed = resolved(*arguments)
    assert unnamed_changes(path, resolved(f"--config={run}"), changed) == set()
    data = changed["data"]
    longest = data["limits"]["max_trajectory_tokens"]
    assert data["engine"]["init_args"]["max_model_len"] >= longest
    assert data["limits"]["max_response_tokens"] < longest
    if path.parent.name != "strategy":
        monkeypatch.chdir(tmp_path)
        assert_plan_and_run_agree_on_the_reference(
            path, parsed(f"--config={run}", f"--config={path}")
        )


def assert_plan_and_run_agree_on_the_reference(path, config):
    model, credit = config["model"], config["credit"]
    if model["reference_name"]:
        Path(model["reference_name"]).parent.mkdir(parents=True)
        Path(model["reference_name"]).touch()
    made = module_parser().instantiate(Namespace(model=model))["model"]
    stages = [resolve_name(credit[slot]["class_path"])() for slot in ("prober", "anchor")]
    made.credit_reads_reference = reader_of(*stages) == "reference"
    is_counted = run_from_config(config, Assumptions(gpus=8)).training.has_reference
    assert made.needs_own_reference() == is_counted
    assert is_counted == (path.stem not in NO_REFERENCE)


@pytest.mark.parametrize("path", ABLATIONS, ids=lambda path: path.stem)
def test_an_ablation_names_one_slot_and_the_steps_that_it_needs(path):
    named = {
        f"{section}.{slot}"
        for section, slots in yaml.safe_load(path.read_text()).items()
        for slot in slots
    }
    assert ("data.num_steps" in named) == (path.stem in NUM_STEPS)
    # Two baselines are outcome-only credit and a loss of their own.
    slots = named - {"data.num_steps"}
    assert len(slots) == (2 if path.stem in ("gspo", "dr_grpo") else 1)


@every_run
@pytest.mark.parametrize("name", ["torch.optim.Adam", "torchao.optim.AdamW8bit"])
def test_another_class_of_optimizer_keeps_rate_betas_and_decay(run, name):
    if name.startswith("torchao"):
        pytest.importorskip("torchao")
    kept = resolved(f"--config={run}")["model"]["optimizer"]["init_args"]
    found = resolved(f"--config={run}", f"--model.optimizer={name}")["model"]["optimizer"]
    assert found["class_path"] == name
    for key in ("lr", "betas", "weight_decay", "eps"):
        assert found["init_args"][key] == kept[key]


def test_a_loss_of_another_class_keeps_nothing_of_the_clip_it_replaces():
    gspo = f"--config={CONFIGS / 'ablations' / 'gspo.yaml'}"
    loss = resolved(f"--config={CONFIGS / 'quickstart.yaml'}", gspo)["model"]["loss"]
    assert loss["class_path"] == "trace_pl.losses.SequenceClip"
    assert (loss["init_args"]["clip_low"], loss["init_args"]["clip_high"]) == (3e-4, 4e-4)


def words(remedy):
    """Return a remedy as arguments of the command line."""
    setting = remedy.setting.split(" (")[0]
    if setting.startswith("--config "):
        return [setting.replace(" ", "=")]
    key, value = setting.split(": ")
    return [f"--{key}={value}"]


FSDP, HSDP = (f"--config=configs/strategy/{name}.yaml" for name in ("fsdp", "hsdp"))
# GPUs, and how a run is divided among them; the advice depends on these and hardly on the run.
SITUATIONS = {
    "copies": ("quickstart", 4, ("--trainer.strategy=ddp", "--trainer.devices=4")),
    "replicas": ("qwen3_4b", 16, (HSDP,)),
    "few shards": (
        "search_agent",
        4,
        (FSDP, "--trainer.devices=4"),
    ),
    "a node": ("qwen3_30b_a3b", 8, (FSDP, "--trainer.devices=8")),
}


@pytest.mark.parametrize("situation", SITUATIONS.values(), ids=SITUATIONS)
def test_what_the_plan_advises_changes_what_it_names_and_saves_what_it_promises(
    situation, pytestconfig, monkeypatch
):
    monkeypatch.chdir(pytestconfig.rootpath)
    run, gpus, arguments = situation
    base = (f"--config=configs/{run}.yaml", f"--model.model_name={MIXTURE}", *arguments)
    found = remedies(run_from_config(parsed(*base), Assumptions(gpus)))
    assert len(found) >= 3
    for remedy in found:
        if "adamw_8bit" in remedy.setting and not find_spec("torchao"):
            continue
        (argument,) = words(remedy)
        key, value = argument.removeprefix("--").split("=")
        if key == "config":
            changed = resolved(*base, argument)
            assert unnamed_changes(Path(value), resolved(*base), changed) == set()
        else:
            before, after = flat(resolved(*base)), flat(resolved(*base, argument))
            assert {k for k in after if after[k] != before[k]} == {key}
        given = None if key in ("trainer.devices", "trainer.num_nodes") else gpus
        made = run_from_config(parsed(*base, argument), Assumptions(given))
        if "lora" in remedy.setting:  # an adapter's size is bounded, not counted
            assert memory_of(made).total < memory_of(remedy.run).total
        else:
            assert memory_of(made) == memory_of(remedy.run), remedy.setting

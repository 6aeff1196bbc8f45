"""Sharded over two and four processes, a run learns what one process learns."""

import itertools
import json
import pickle
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from processes import Ranks
from random_models import make_qwen3, make_qwen3_moe
from safetensors import safe_open
from sharded_run import main, run

from trace_pl.engines.vllm.engine import VLLMEngine
from trace_pl.errors import ConfigError
from trace_pl.models.checkpoint import CheckpointFiles, SafeReader, read_checkpoint
from trace_pl.models.loading import load_model
from trace_pl.rollout.parity import check_parity
from trace_pl.training.export import export

FSDP, HSDP, OFFLOAD = {}, {"shard_size": 2}, {"reference_on_cpu": True}
STEPS = {"epochs": 2, "plan": {"num_steps": 2, "num_passes": 2}}
EXPERTS, HALF = {"expert_parallel_size": 2}, {"compute_dtype": "bfloat16"}


def run_ranks(folder, num_processes, **jobs):
    """Run jobs in a process group and return what its first rank found."""
    asked, found = folder / "jobs.json", folder / "found.json"
    asked.write_text(json.dumps(jobs))
    Ranks(num_processes, main, asked, found).finish()
    return json.loads(found.read_text())


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of a dense model with a tied head and of one with experts, and one process's runs."""
    folder = tmp_path_factory.mktemp("models")
    make_qwen3(tie_word_embeddings=True).save_pretrained(folder / "dense")
    make_qwen3_moe(hidden_size=64, head_dim=32).save_pretrained(folder / "moe")  # as vLLM wants it
    return {name: str(folder / name) for name in ("dense", "moe")}


@pytest.fixture(scope="module")
def alone(models):
    """What one process finds."""
    return {name: run(model) for name, model in models.items()}


@pytest.fixture(scope="module")
def two(models, alone, tmp_path_factory):
    """What two processes find, and the folder of their checkpoints."""
    folder = tmp_path_factory.mktemp("two")
    run(models["dense"], epochs=1, save=str(folder / "single.ckpt"))
    jobs = {
        f"{name}-{kind}": {"model": model, "strategy": strategy}
        for name, model in models.items()
        for kind, strategy in {"ddp": "ddp", "fsdp": FSDP, "offload": OFFLOAD}.items()
    }
    moe = {"model": models["moe"], "strategy": FSDP}
    dense = {"model": models["dense"], "strategy": FSDP}
    dealt = {"model": models["moe"], "strategy": EXPERTS}
    lora = {**dense, "adapter": {"rank": 2}}
    jobs |= {
        "saved": {**moe, "epochs": 1, "save": str(folder / "sharded.ckpt")},
        "resumed": {**moe, "resume": str(folder / "sharded.ckpt")},
        "from-one": {**dense, "resume": str(folder / "single.ckpt")},
        "lora": lora,
        "lora-saved": {**lora, "epochs": 1, "save": str(folder / "lora.ckpt")},
        "lora-resumed": {**lora, "resume": str(folder / "lora.ckpt")},
        "moe-experts": {
            **dealt,
            "strategy": {**EXPERTS, **OFFLOAD},
            "activation_checkpointing": True,
        },
        "experts-saved": {**dealt, "epochs": 1, "save": str(folder / "experts.ckpt")},
        "experts-resumed": {**moe, "resume": str(folder / "experts.ckpt")},
        "experts-lora": {**dealt, "adapter": {"rank": 2}},
        "moe-lora": {**moe, "adapter": {"rank": 2}},
        "dense-half": {**dense, "strategy": HALF},
        "moe-half": {**dealt, "strategy": {**EXPERTS, **HALF}},
        "steps": {**moe, **STEPS, "activation_checkpointing": True},
    }
    return run_ranks(folder, 2, **jobs), folder


def close(losses):
    return pytest.approx(losses, abs=1e-4)


@pytest.mark.parametrize(
    ("model", "strategy"),
    [
        *itertools.product(["dense", "moe"], ["ddp", "fsdp", "offload"]),
        ("moe", "experts"),
    ],
)
def test_two_ranks_with_ragged_work_learn_and_score_what_one_does(alone, two, model, strategy):
    one, found = alone[model], two[0][f"{model}-{strategy}"]
    assert abs(one["losses"][0] - one["losses"][-1]) > 1e-2
    assert found["losses"] == close(one["losses"])
    assert found["norms"] == pytest.approx(one["norms"], rel=1e-3)
    assert found["steps"] == one["steps"] == 3
    mine = one["scores"][:5] + one["scores"][7:]  # of the first and the third group
    assert torch.tensor(found["scores"]).shape == torch.tensor(mine).shape
    assert (torch.tensor(found["scores"]) - torch.tensor(mine)).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["dense-ddp", "moe-fsdp", "moe-experts"])
def test_metrics_of_two_ragged_ranks_are_those_of_the_union(alone, two, name):
    expected, found = alone[name.split("-")[0]]["metrics"], two[0][name]["metrics"]
    assert found.keys() == expected.keys()
    assert {"rollout/success", "credit/value_outcome_correlation"} <= found.keys()
    assert {"mismatch/probability_correlation", "loss/surprisal"} <= found.keys()
    # Routers also see the tokens of a micro-batch without loss, and balance is that of a forward.
    loose = {"loss/expert_balance": 0.2, "experts/max_load": 0.02, "loss/gradient_norm": 1e-3}
    for tag, value in expected.items():
        assert found[tag] == pytest.approx(value, rel=loose.get(tag, 2e-4), abs=1e-4), tag


def test_ranks_exchange_metrics_twice_an_epoch(two):
    assert two[0]["moe-fsdp"]["exchanges"] == 2 * 3


@pytest.mark.parametrize("model", ["dense", "moe"])
def test_in_bfloat16_log_probs_and_master_weights_stay_float32(alone, two, model):
    one, found = alone[model], two[0][f"{model}-half"]
    assert found["losses"] == pytest.approx(one["losses"], rel=0.02)
    assert found["norms"][0] == pytest.approx(one["norms"][0], rel=0.05)
    scores = torch.tensor(found["scores"])
    mine = torch.tensor(one["scores"][:5] + one["scores"][7:])
    assert (scores - mine).abs().mean() < 0.05
    assert not torch.equal(scores, scores.bfloat16().float())
    assert found["pushed"] == pytest.approx(one["pushed"], rel=1e-3)


@pytest.mark.parametrize("name", ["dense-fsdp", "moe-fsdp", "moe-experts"])
def test_a_sharded_policy_is_pushed_whole_under_the_names_of_its_files(alone, two, models, name):
    model = name.split("-")[0]
    pushed, expected = two[0][name]["pushed"], alone[model]["pushed"]
    with safe_open(Path(models[model]) / "model.safetensors", "pt") as file:
        assert set(pushed) == set(file.keys())
    assert pushed == pytest.approx(expected, rel=1e-4)


def test_a_run_goes_on_with_any_number_of_ranks(alone, two, models, tmp_path):
    found, folder = two
    assert found["resumed"]["losses"] == close(alone["moe"]["losses"][1:])
    assert found["from-one"]["losses"] == close(alone["dense"]["losses"][1:])
    job = {"model": models["moe"], "strategy": FSDP, "resume": str(folder / "sharded.ckpt")}
    one = run_ranks(tmp_path, 1, resumed=job)
    assert one["resumed"]["losses"] == close(alone["moe"]["losses"][1:])


def test_dealt_experts_are_resumed_by_ranks_that_hold_all_of_them_and_take_an_adapter(alone, two):
    found, _ = two
    assert found["experts-resumed"]["losses"] == close(alone["moe"]["losses"][1:])
    assert found["experts-lora"]["losses"] == close(found["moe-lora"]["losses"])


def test_several_steps_and_passes_are_those_of_one_process(models, two):
    one, found = run(models["moe"], **STEPS), two[0]["steps"]
    assert found["steps"] == one["steps"] == 8
    assert found["losses"] == close(one["losses"])
    assert found["norms"] == pytest.approx(one["norms"], rel=1e-3)


@pytest.mark.parametrize("name", ["dense-ddp", "moe-fsdp", "moe-experts"])
def test_ranks_that_sampled_unlike_numbers_train_on_like_ones(two, name):
    # Eight rollouts of one rank and two of the other, three epochs in forwards of 60 tokens.
    assert two[0][name]["num_rows"] == [[2, 2, 1] * 3, [2, 2, 1] * 3]


def test_an_adapter_is_sharded_saved_alone_and_resumed(two):
    found, folder = two
    assert found["lora-resumed"]["losses"] == close(found["lora"]["losses"][1:])
    assert found["lora"]["losses"][0] != close([found["lora"]["losses"][2]])
    weights = read_checkpoint(folder / "lora.ckpt")["state_dict"]
    assert weights
    assert all(".lora_" in name for name in weights)


@pytest.mark.parametrize("name", ["sharded.ckpt", "experts.ckpt"])
def test_a_sharded_checkpoint_is_exported(name, two, models, tmp_path):
    folder = tmp_path / "exported"
    export(two[1] / name, folder)
    trained, policy = load_model(str(folder)), load_model(models["moe"])
    weights = read_checkpoint(two[1] / name)["state_dict"]
    assert not torch.equal(policy.lm_head.weight, weights["policy.lm_head.weight"])
    policy.load_state_dict({name.removeprefix("policy."): t for name, t in weights.items()})
    for name, tensor in trained.state_dict().items():
        assert torch.equal(tensor, weights[f"policy.{name}"])
    engine = VLLMEngine(str(folder), 256, max_num_seqs=4, kv_cache_gib=0.125, num_threads=1)
    check_parity(engine, policy, list(range(3, 60)), tolerance=1e-4)
    engine.close()


def test_nothing_half_written_is_left_and_a_broken_checkpoint_is_refused(two, tmp_path):
    folder = two[1]
    assert [path for path in folder.iterdir() if path.name.startswith(".")] == []
    with pytest.raises(ConfigError, match="complete sharded checkpoint"):
        SafeReader(tmp_path).read_metadata()
    (tmp_path / ".metadata").write_bytes(pickle.dumps(subprocess.run))
    with pytest.raises(ConfigError, match=r"names 'subprocess\.run'"):
        SafeReader(tmp_path).read_metadata()


def test_a_checkpoint_without_a_shard_or_for_one_process_is_refused(two, models, tmp_path):
    broken = tmp_path / "broken.ckpt"
    shutil.copytree(two[1] / "sharded.ckpt", broken)
    next(broken.glob("*.distcp")).unlink()
    with pytest.raises(ConfigError, match=r"all weights in the sharded checkpoint.*No such file"):
        export(broken, tmp_path / "exported")
    assert list(tmp_path.iterdir()) == [broken]
    with pytest.raises(ConfigError, match=r"configs/strategy/fsdp\.yaml"):
        CheckpointFiles().load_checkpoint(two[1] / "sharded.ckpt")


def test_four_ranks_shard_in_pairs_that_replicate(alone, two, models, tmp_path):
    # The fourth rank has sampled no rollout at all.
    jobs = {name: {"model": model, "strategy": HSDP} for name, model in models.items()}
    jobs["moe-experts"] = {"model": models["moe"], "strategy": {**HSDP, **EXPERTS}}
    resumed = {"model": models["moe"], "strategy": EXPERTS, "resume": str(two[1] / "experts.ckpt")}
    found = run_ranks(tmp_path, 4, **jobs, resumed=resumed)
    for name in jobs:
        assert found[name]["losses"] == close(alone[name.split("-")[0]]["losses"])
        assert all(min(rank) > 0 for rank in found[name]["num_rows"])
    assert found["resumed"]["losses"] == close(alone["moe"]["losses"][1:])

"""Real runs of the command line: real vLLM, real Trainer, real tools, the shipped base model."""

import json
from pathlib import Path

import processes
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL = [
    "--data.questions_per_epoch=3",
    "--data.group_size=4",
    "--data.evaluation_questions=8",
    "--trainer.check_val_every_n_epoch=1",
]


def fit(runs: Path, *arguments: str) -> None:
    save = f"--trainer.logger.init_args.save_dir={runs}"
    processes.run("fit", "--config", CONFIGS / "quickstart.yaml", save, *SMALL, *arguments)


def scalars(run: Path) -> dict[str, list[float]]:
    events = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
    return {tag: [e.value for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    fit(runs, "--trainer.max_epochs=2")
    (run,) = (runs / "quickstart").iterdir()
    return run


def test_a_run_leaves_its_record(run):
    summary = json.loads((run / "summary.json").read_text())
    assert summary["epochs"] == 2
    assert summary["updates"] == 4
    assert summary["questions"] == 8
    assert {"success_before", "success_after", "seconds", "tensorboard"} <= summary.keys()
    assert Path(summary["checkpoint"]).is_file()
    assert (run / "config.yaml").is_file()


def test_tensorboard_shows_reward_turns_values_credit_loss_and_time(run):
    found = scalars(run)
    expected = ("rollout/success", "rollout/tool_turns", "credit/value_last", "credit/outcome_abs")
    for tag in (*expected, "loss/policy_loss", "time/rollout_s", "time/credit_s", "time/update_s"):
        assert len(found[tag]) == 2, tag
    assert len(found["validation/success"]) == 3
    images = EventAccumulator(str(run), size_guidance={"images": 0}).Reload().Tags()["images"]
    assert "credit/value_curve" in images


def test_engine_and_trainer_agree_after_every_push(run):
    assert max(scalars(run)["weights/parity_nats"]) < 1e-4
    found = scalars(run)
    assert max(found["mismatch/abs_nats"]) < 1e-4
    assert max(found["mismatch/kl"]) < 1e-6
    assert min(found["mismatch/probability_correlation"]) > 0.9999
    assert max(found["mismatch/weights_above_cap"]) == 0.0


def test_a_checkpoint_holds_the_policy_and_no_reference(run):
    checkpoint = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    assert all(name.startswith("policy.") for name in checkpoint["state_dict"])
    tensors = {tensor.data_ptr(): tensor for tensor in checkpoint["state_dict"].values()}
    assert sum(tensor.numel() for tensor in tensors.values()) < 1_200_000
    assert checkpoint["reference_name"] == "closed-web-base"
    (moments,) = [len(s["state"]) for s in checkpoint["optimizer_states"]]
    assert moments == len(tensors)


def test_resuming_at_the_end_of_an_epoch_continues_questions_steps_and_folder(run):
    before = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    first_success = json.loads((run / "summary.json").read_text())["success_before"]
    fit(run.parent.parent, "--trainer.max_epochs=3", "--ckpt_path=last")
    after = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    cursor = {
        name: checkpoint["RolloutDataModule"]["cursor"]
        for name, checkpoint in (("before", before), ("after", after))
    }
    assert cursor == {"before": 6, "after": 9}
    assert (before["global_step"], after["global_step"]) == (4, 6)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["epochs"] == 3
    assert summary["success_before"] == first_success
    assert [path.name for path in run.parent.iterdir()] == [run.name]

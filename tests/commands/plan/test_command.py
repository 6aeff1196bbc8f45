"""`trace-pl plan`, the check before a run, and what it advises."""

from dataclasses import replace

import pytest
from cli_runner import run_cli
from jsonargparse import Namespace
from wide_models import make_wide_moe

from trace_pl.commands.plan.from_config import optimizer_bytes, run_from_config
from trace_pl.commands.plan.inputs import Assumptions, Device, Sharding
from trace_pl.commands.plan.memory import memory_of
from trace_pl.commands.plan.phases import phases_of
from trace_pl.commands.plan.planning import make_run, parse_config
from trace_pl.commands.plan.remedies import combination, fits
from trace_pl.commands.plan.require import require_fit
from trace_pl.engines import EngineNeeds, HFEngine
from trace_pl.errors import ConfigError

QUICKSTART = "--config=configs/quickstart.yaml"
LARGE = (QUICKSTART, "--model.model_name=Qwen/Qwen3-4B-Thinking-2507")
MIXTURE = (QUICKSTART, "--model.model_name=Qwen/Qwen3-30B-A3B-Thinking-2507")


@pytest.fixture(autouse=True)
def _in_root(pytestconfig, monkeypatch):
    monkeypatch.chdir(pytestconfig.rootpath)


def sharded(config, **settings):
    strategy = {
        "shard_size": None,
        "reference_on_cpu": False,
        "compute_dtype": "bfloat16",
        "expert_parallel_size": 1,
    }
    config["trainer"]["strategy"] = Namespace(
        class_path="trace_pl.distributed.ShardedStrategy",
        init_args=Namespace(**{**strategy, **settings}),
    )
    return config


def test_the_command_prints_memory_and_phases_and_says_that_a_run_fits(capsys):
    assert run_cli("plan", QUICKSTART, "--gpus", "1", "--gpu-memory", "80") == 0
    text = capsys.readouterr().out
    for word in ("weights", "kv cache", "buffers", "fits", "rollout", "credit", "update", "push"):
        assert word in text
    assert "1.13 M parameters" in text


def test_the_command_says_what_to_change_where_a_run_does_not_fit(capsys):
    assert run_cli("plan", *LARGE, "--gpus=8", "--tokens-per-trajectory=16384") == 1
    text = capsys.readouterr().out
    assert "DOES NOT FIT" in text
    assert "model.activation_checkpointing: true" in text
    assert "--config configs/strategy/fsdp.yaml" in text
    assert "These together fit" in text


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("--gpus=-1", "expected a positive number, got -1"),
        ("--utilisation=0", "expected a positive number, got 0"),
        ("--gpu-memory=much", "invalid float value: 'much'"),
    ],
)
def test_the_command_refuses_numbers_that_mean_nothing(wrong, message, capsys):
    assert run_cli("plan", QUICKSTART, wrong) == 2
    assert message in capsys.readouterr().err


def test_configs_and_overrides_reach_the_plan():
    options = "--config=configs/options/activation_checkpointing.yaml"
    run = make_run([QUICKSTART, options, "--data.group_size=4", "--gpus=2", "--turns=5"])
    assert run.training.has_checkpointing
    assert run.work.trajectories == 16 * 4
    assert (run.work.turns, run.work.sampled_tokens) == (5, 6 * 64)
    assert run.sharding == Sharding("ddp", world=2, has_buckets=True)
    assert run.training.optimizer_bytes == 8.0
    assert run.engine.kv_cache_gib == 1.0


def test_a_run_without_turn_credit_reads_no_reference():
    run = make_run([QUICKSTART, "--config=configs/ablations/grpo.yaml"])
    assert not run.training.has_reference
    assert not run.training.has_credit
    kl = make_run([QUICKSTART, *(f"--config=configs/ablations/{x}.yaml" for x in ("grpo", "kl"))])
    assert kl.training.has_reference
    assert kl.training.has_kl


def test_an_adapter_needs_no_reference_of_its_own():
    run = make_run([QUICKSTART, "--config=configs/options/lora.yaml"])
    assert not run.training.has_reference
    assert run.shape.trained == run.shape.counts.adapter > 0


def test_the_sharded_strategy_reaches_the_plan():
    config = sharded(parse_config([QUICKSTART]), shard_size=4, reference_on_cpu=True)
    run = run_from_config(config, Assumptions(gpus=8))
    assert run.sharding == Sharding(
        "sharded", world=8, shard=4, param_bytes=2, reference_on_cpu=True
    )
    with pytest.raises(ConfigError, match="divide the 6 GPUs, got 4"):
        run_from_config(config, Assumptions(gpus=6))


@pytest.mark.parametrize(
    ("arguments", "size", "shard"),
    [(MIXTURE, 3, None), (MIXTURE, 8, 4), (MIXTURE, 0, 4), ((QUICKSTART,), 2, 4)],
)
def test_experts_are_divided_as_they_can_be(arguments, size, shard):
    good = sharded(parse_config([*MIXTURE]), expert_parallel_size=4)
    assert run_from_config(good, Assumptions(gpus=8)).sharding.expert_parallel == 4
    config = sharded(parse_config([*arguments]), expert_parallel_size=size, shard_size=shard)
    with pytest.raises(ConfigError, match=rf"expert_parallel_size to divide .* got {size}\."):
        run_from_config(config, Assumptions(gpus=8))


def test_mixed_precision_casts_the_policy_and_not_the_reference():
    sharding = make_run([QUICKSTART, "--trainer.precision=bf16-mixed"]).sharding
    assert (sharding.master_bytes, sharding.param_bytes, sharding.reference_bytes) == (4, 2, 4)
    assert sharding.is_autocast
    sharding = make_run([QUICKSTART, "--model.dtype=bfloat16"]).sharding
    assert (sharding.master_bytes, sharding.param_bytes, sharding.reference_bytes) == (2, 2, 2)


class OneSlotEngine(HFEngine):
    """An engine of one's own, with settings and habits that no other has."""

    runs_apart = True

    @classmethod
    def needs(cls, settings):
        return EngineNeeds("bfloat16", settings["window"], max_num_seqs=1, has_own_gpus=True)


def test_an_engine_of_ones_own_is_planned_as_it_says():
    config = parse_config([QUICKSTART, "--trainer.devices=2"])
    path = f"{OneSlotEngine.__module__}.{OneSlotEngine.__name__}"
    config["data"]["engine"] = Namespace(class_path=path, init_args=Namespace(window=512))
    run = run_from_config(config)
    assert (run.engine.max_model_len, run.engine.max_num_seqs, run.engine.own_gpus) == (512, 1, 2)
    assert memory_of(run).engine_weights == 0.0


def test_an_unknown_strategy_is_refused():
    config = parse_config([QUICKSTART, "--trainer.strategy=deepspeed"])
    with pytest.raises(ConfigError, match="got 'deepspeed'"):
        run_from_config(config)


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("torch.optim.AdamW", {}, 8.0),
        ("torch.optim.SGD", {"lr": 0.1}, 0.0),
        ("torch.optim.SGD", {"lr": 0.1, "momentum": 0.9}, 4.0),
        ("torchao.optim.AdamW8bit", {}, 2.03),
    ],
)
def test_the_state_of_an_optimizer_is_known(name, settings, expected):
    optimizer = Namespace(class_path=name, init_args=Namespace(**settings))
    assert optimizer_bytes(optimizer, 4) == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize(
    ("devices", "count"), [("8", 8), ("[0, 1]", 2), ("0,1,2", 3), ("-1", 1), ("auto", 1)]
)
def test_the_number_of_gpus_is_what_lightning_makes_of_the_devices(devices, count):
    config = parse_config([QUICKSTART, f"--trainer.devices={devices}", "--trainer.num_nodes=2"])
    assert run_from_config(config).sharding.world == 2 * count


def test_the_combination_that_is_advised_fits():
    run = make_run([*LARGE, "--gpus=8", "--tokens-per-trajectory=16384"])
    assert not fits(run)
    assert fits(combination(run)[-1].run)


def test_nothing_is_promised_where_nothing_helps():
    run = make_run([*MIXTURE, "--gpus=1", "--gpu-memory=8"])
    assert combination(run) == []


def test_a_run_that_can_not_fit_is_stopped_with_the_table():
    config = parse_config(list(LARGE))
    with pytest.raises(ConfigError, match="of 40: DOES NOT FIT") as caught:
        require_fit(config, gpu_memory=40.0, gpus=1)
    assert "weights" in str(caught.value)
    assert "configs/options/adamw_8bit.yaml" in str(caught.value)


def test_a_run_that_fits_starts_and_one_that_may_not_is_warned_of(caplog):
    config = sharded(parse_config([*LARGE, "--model.activation_checkpointing=true"]))
    require_fit(config, gpu_memory=80.0, gpus=8)
    assert not caplog.records
    config["data"]["limits"]["max_trajectory_tokens"] = 131_072
    require_fit(config, gpu_memory=80.0, gpus=8)
    assert "A forward of 131072 tokens may not fit" in caplog.text


def test_a_model_that_needs_numbers_to_run_is_not_planned_and_runs(tmp_path, capsys, caplog):
    config = make_wide_moe().config
    config.experts_implementation = "eager"  # looks for the experts that have tokens
    config.save_pretrained(tmp_path)
    arguments = [QUICKSTART, f"--model.model_name={tmp_path}"]
    assert run_cli("plan", *arguments) == 2
    assert "model whose memory can be counted, got 'qwen3_moe'" in capsys.readouterr().err
    require_fit(parse_config(arguments), gpu_memory=80.0)
    assert "The run starts without a look at its memory. Expected a model" in caplog.text


def test_a_cache_too_small_for_one_sequence_is_told():
    arguments = [*LARGE, "--data.engine.max_model_len=32768", "--data.engine.kv_cache_gib=0.5"]
    with pytest.raises(ConfigError, match=r"takes 9\.00 GiB of cache"):
        require_fit(parse_config(arguments), gpu_memory=10_000.0, gpus=1)


def test_twice_the_rate_takes_half_the_time():
    slow = make_run([*LARGE, "--gpus=8"])
    fast = replace(slow, device=Device(peak_tflops_fp32=2 * slow.device.peak_tflops_fp32))
    for before, after in zip(phases_of(slow), phases_of(fast), strict=True):
        assert after.compute_s == pytest.approx(before.compute_s / 2)
        assert after.memory_s == before.memory_s

"""What the command line says of settings that are wrong: one line, whatever is wrong with them."""

import os

import pytest
from cli_runner import run_cli

from trace_pl.commands.cli import TraceCLI
from trace_pl.commands.configs import find_config, shipped_names
from trace_pl.commands.follow import Follower
from trace_pl.commands.plan.planning import ParsedCLI
from trace_pl.commands.settings import read_arguments
from trace_pl.commands.signatures import slots_of
from trace_pl.errors import ConfigError

BACKUPS = (
    "There are: callbacks.FlippedCredit, callbacks.KStepTD, callbacks.MonteCarlo, "
    "callbacks.NoisyCredit, callbacks.PositiveGain, callbacks.ReturnToGo, callbacks.ShuffledCredit."
)
ANCHORS = (
    "There are: callbacks.A2TGPOAnchor, callbacks.AnswerLikelihood, callbacks.GiGPOAnchor, "
    "callbacks.IGPOAnchor, callbacks.OutcomeOnly, callbacks.ReadinessBaseline, "
    "callbacks.TraceAnchor, callbacks.TurnwiseAnchor."
)
REWARDS = (
    "There are: trace_pl.tasks.EnvironmentReward, trace_pl.tasks.ExactMatchReward, "
    "trace_pl.tasks.TokenF1Reward."
)
LOSSES = "There are: trace_pl.losses.SequenceClip, trace_pl.losses.TokenClip."
TRACE_ANCHOR = "It takes outcome_weight, turn_weight, terminal_scale, outcome, train_equal_groups."
THERE = "on the command line"


@pytest.fixture(scope="module")
def cli():
    """A command line that has parsed the quickstart and built nothing."""
    return ParsedCLI(["--config", "quickstart"])


def complaint(cli, *arguments: str) -> str:
    """Return what `trace-pl fit --config quickstart ARGUMENTS` says of its settings."""
    try:
        cli.parse_arguments(cli.parser, ["--config", "quickstart", *arguments])
        TraceCLI.instantiate_classes(cli)
    except ConfigError as error:
        return str(error)
    return "nothing"


ARGUMENTS = [
    # a wrong key
    ("--credit.anchor.init_args.turn_wieght 0.1",
     f"Expected a setting of callbacks.TraceAnchor {THERE}, got "
     f"`credit.anchor.init_args.turn_wieght`. Did you mean `turn_weight`? {TRACE_ANCHOR}"),
    ("--credit.anchor.turn_wieght 0.1",
     f"Expected a setting of callbacks.TraceAnchor {THERE}, got `credit.anchor.turn_wieght`. "
     f"Did you mean `turn_weight`? {TRACE_ANCHOR}"),
    ("--credit.anchr callbacks.OutcomeOnly",
     f"Expected a setting of `credit` {THERE}, got `credit.anchr`. Did you mean `anchor`? "
     "It takes segmenter, prober, backup, anchor, assigner."),
    ("--dat.group_size 8",
     f"Expected a setting of `trace-pl fit` {THERE}, got `dat`. Did you mean `data`? It takes "
     "config, seed_everything, trainer, model, data, credit,"),
    ("--ckpt last",
     f"Expected a setting of `trace-pl fit` {THERE}, got `ckpt`. Did you mean `ckpt_path`? It "
     "takes config, seed_everything, trainer, model, data, credit,"),
    ("--credit.assigner.tokens 1",
     f"Expected a setting of `credit.assigner` {THERE}, got `credit.assigner.tokens`. "
     "It takes tokens_per_forward."),
    ("--trainer.logger.init_args.save_dirr x",
     f"Expected a setting of lightning.pytorch.loggers.TensorBoardLogger {THERE}, got "
     "`trainer.logger.init_args.save_dirr`. Did you mean `save_dir`? It takes save_dir, name, "
     "version, log_graph, default_hp_metric, prefix, sub_dir, comment, purge_step, max_queue, "
     "flush_secs, filename_suffix."),
    ("--model.optimizer.init_args.lrr 3",
     f"Expected a setting of torch.optim.AdamW {THERE}, got `model.optimizer.init_args.lrr`. "
     "Did you mean `lr`? It takes lr, betas, eps, weight_decay, amsgrad, maximize, foreach, "
     "capturable, differentiable, fused."),
    ("--trainer.callbacks+=callbacks.RolloutSamples --trainer.callbacks.init_args.every 3",
     f"Expected a setting of callbacks.RolloutSamples {THERE}, got "
     "`trainer.callbacks.init_args.every`. It takes every_n_epochs, num_rollouts."),
    # a wrong class
    ("--credit.backup callbacks.MonteCarl",
     f"Expected a Backup at `credit.backup` {THERE}, got 'callbacks.MonteCarl', which does not "
     f"exist. Did you mean `callbacks.MonteCarlo`? {BACKUPS}"),
    ("--credit.backup callbacks.NoSuch",
     f"Expected a Backup at `credit.backup` {THERE}, got 'callbacks.NoSuch', which does not "
     f"exist. {BACKUPS}"),
    ("--credit.backup callbacks.OutcomeOnly",
     f"Expected a Backup at `credit.backup` {THERE}, got 'callbacks.OutcomeOnly', which is no "
     f"Backup. {BACKUPS}"),
    ("--credit.anchor OutcomesOnly",
     f"Expected an Anchor at `credit.anchor` {THERE}, got 'OutcomesOnly', which does not exist. "
     f"Did you mean `callbacks.OutcomeOnly`? {ANCHORS}"),
    ("--credit.anchor 5",
     f"Expected an Anchor at `credit.anchor` {THERE}, got '5'. {ANCHORS}"),
    ("--model.loss nopackage.NoSuch",
     f"Expected a PolicyLoss at `model.loss` {THERE}, got 'nopackage.NoSuch', which cannot be "
     f"imported (No module named 'nopackage'). {LOSSES}"),
    ("--model.loss trace_pl.losses.TokenMean",
     f"Expected a PolicyLoss at `model.loss` {THERE}, got 'trace_pl.losses.TokenMean', which is "
     f"no PolicyLoss. {LOSSES}"),
    ("--model.loss.init_args.normaliser TokenMea",
     f"Expected a Normaliser at `model.loss.init_args.normaliser` {THERE}, got 'TokenMea', which "
     "does not exist. Did you mean `trace_pl.losses.TokenMean`? There are:"),
    ("--credit.prober.init_args.value NoSuch",
     f"Expected a ValueTransform at `credit.prober.init_args.value` {THERE}, got 'NoSuch', which "
     "does not exist. There are: trace_pl.credit.LinearGapValue,"),
    ("--model.optimizer torch.optim.AdamWW",
     f"Expected an Optimizer at `model.optimizer` {THERE}, got 'torch.optim.AdamWW', which does "
     "not exist. Did you mean `torch.optim.AdamW`? There are: torch.optim."),
    ("--data.reward NoSuch",
     f"Expected a Reward at `data.reward` {THERE}, got 'NoSuch', which does not exist. "
     f"{REWARDS}"),
    ("--data.call_format XmlFormats",
     f"Expected a ToolCallFormat at `data.call_format` {THERE}, got 'XmlFormats', which does not "
     "exist. Did you mean `trace_pl.rollout.XmlFormat`? There are: trace_pl.rollout."),
    ("--data.reward my_rewards.of_answer",
     f"Expected a Reward at `data.reward` {THERE}, got 'my_rewards.of_answer', which is no "
     f"Reward. {REWARDS}"),
    ("--data.reward my_rewards.NUMBER",
     f"Expected a Reward at `data.reward` {THERE}, got 'my_rewards.NUMBER', which is no Reward."),
    ("--data.reward.init_args.format_bonus 0.1",
     f"Expected `class_path` at `data.reward` {THERE}, got 'init_args'. "
     f"{REWARDS}"),
    ("--data.engine vllm",
     f"Expected a RolloutEngine at `data.engine` {THERE}, got 'vllm', which does not exist. "
     "There are: trace_pl."),
    ("--trainer.strategy trace_pl.distributed.strategy.SharedStrategy",
     f"Expected a Strategy at `trainer.strategy` {THERE}, got "
     "'trace_pl.distributed.strategy.SharedStrategy', which does not exist. Did you mean "
     "`trace_pl.distributed.ShardedStrategy`? There are:"),
    # a wrong value
    ("--data.group_size three",
     f"Expected a whole number for `data.group_size` {THERE}, got 'three'."),
    ("--credit.backup.init_args.num_steps 1.5",
     f"Expected a whole number for `credit.backup.init_args.num_steps` {THERE}, got '1.5'."),
    ("--trainer.max_epochs many",
     f"Expected a whole number or null for `trainer.max_epochs` {THERE}, got 'many'."),
    ("--trainer.precision 12",
     "Expected one of 64, 32, 16, transformer-engine, transformer-engine-float16, 16-true, "
     "16-mixed, bf16-true, bf16-mixed, 32-true, 64-true, bf16 or null for `trainer.precision` "
     f"{THERE}, got '12'."),
    ("--model.optimizer.init_args.lr fast",
     f"Expected a number or a Tensor for `model.optimizer.init_args.lr` {THERE}, got 'fast'."),
    ("--data.task.init_args.hops three",
     f"Expected a list of whole numbers for `data.task.init_args.hops` {THERE}, got 'three'."),
    ("--model.optimizer.init_args.betas [0.9]",
     "Expected a list of 2 (a number or a Tensor) for `model.optimizer.init_args.betas` "
     f"{THERE}, got [0.9]."),
    ("--data.limits {max_turn:_3}",
     f"Expected a setting of trace_pl.rollout.AgentLimits {THERE}, got "
     "`data.limits.max_turn`. Did you mean `max_turns`?"),
    ("--config {data:_{group_sise:_3}}",
     f"Expected a setting of `data` {THERE}, got `data.group_sise`. Did you mean `group_size`?"),
    ("--credit.backup broken_stages.Mine",
     f"Expected a Backup at `credit.backup` {THERE}, got 'broken_stages.Mine', which cannot be "
     f"imported (half written). {BACKUPS}"),
    ("--seed_everything x",
     f"Expected true or false or a whole number for `seed_everything` {THERE}, got 'x'."),
    ("--model foo", f"Expected settings below `model` {THERE}, got 'foo'. It takes model_name,"),
    # too little, too much
    ("--data.task trace_pl.tasks.FileTask",
     "Expected train, validation for trace_pl.tasks.FileTask, got none. Set "
     "data.task.init_args.train, data.task.init_args.validation."),
    ("--data.group_size", "Expected a value after --data.group_size, got none."),
    ("stray", f"Expected settings as `--key value`, got 'stray' {THERE}."),
    ("-x", f"Expected settings as `--key value`, got '-x' {THERE}."),
    ("--data.model_name x",
     'Linked "data.model_name" must be given via "model.model_name". See `trace-pl fit --help`.'),
    ("--print_config=foo",
     'Invalid option "foo" for --print_config. See `trace-pl fit --help`.'),
    ("--data.parity_tolerance -0.1", "Expected data.parity_tolerance of at least 0, got -0.1."),
    # what a machine cannot do
    ("--trainer.accelerator cpu --trainer.strategy fsdp",
     "Expected settings that fit this machine and each other, got: The strategy `fsdp` requires a "
     "GPU accelerator, but received `accelerator='cpu'`."),
    ("--trainer.accelerator tpu",
     "Expected settings that fit this machine and each other, got:"),
    ("--trainer.accelerator cpu --trainer.devices 0",
     "Expected settings that fit this machine and each other, got: `Trainer(devices='0')` value "
     "is not a valid input using cpu accelerator."),
    ("--trainer.logger lightning.pytorch.loggers.CometLogger",
     "Expected settings that fit this machine and each other, got:"),
    # configs
    ("--config nowhere.yaml",
     "Expected a config file or the name of a shipped config, got 'nowhere.yaml'. `trace-pl "
     "configs` lists them."),
    ("--config grpo",
     "Expected a config file or the name of a shipped config, got 'grpo'. Did you mean "
     "`ablations/grpo`? `trace-pl configs` lists them."),
    ("--config options/loar",
     "Expected a config file or the name of a shipped config, got 'options/loar'. Did you mean "
     "`options/lora`? `trace-pl configs` lists them."),
    ("--config", "Expected a value after --config, got none."),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "line"), ARGUMENTS, ids=[given for given, _ in ARGUMENTS])
def test_a_wrong_argument_is_one_line(cli, tmp_path, monkeypatch, arguments, line):
    (tmp_path / "broken_stages.py").write_text("raise RuntimeError('half\\nwritten')\n")
    (tmp_path / "my_rewards.py").write_text("NUMBER = 3\ndef of_answer(answer): return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    said = complaint(
        cli, *(word.replace("_3", " 3").replace("_{", " {") for word in arguments.split())
    )
    assert said[: len(line)] == line
    assert "\n" not in said
    assert len(said) < 900


OWN_CODE = {
    "int('abc')\n": "which cannot be imported (ValueError: invalid literal for int() with base "
    "10: 'abc' in '{}', line 1)",
    "import os\n\nos.nothing\n": "which cannot be imported (AttributeError: module 'os' has no "
    "attribute 'nothing' in '{}', line 3)",
    "class Other:\n    pass\n": "which does not exist",
    "import callbacks\n\n\nclass Mine(callbacks.PolicyProber):\n    reads_policy = True\n": "which "
    "cannot be imported (Expected `reader` in Mine, got `reads_policy`, which nobody reads.",
    "import callbacks\n\n\nclass Mine(callbacks.NoProber):\n    def __init__(self) -> None:\n"
    "        {}['missing']\n": "got KeyError: 'missing' in '{}', line 6.",
    "import callbacks\n\n\nclass Mine(callbacks.NoProber):\n    def __init__(self) -> None:\n"
    "        assert not vars(callbacks)\n": "got AssertionError in '{}', line 6.",
}


@pytest.mark.parametrize("number", range(len(OWN_CODE)))
def test_a_fault_in_a_module_of_ones_own_is_told_with_its_place(cli, tmp_path, monkeypatch, number):
    code, words = list(OWN_CODE.items())[number]
    path = tmp_path / f"own_stages_{number}.py"
    path.write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    said = complaint(cli, "--credit.prober", f"own_stages_{number}.Mine")
    assert words.replace("{}", str(path)) in said.replace(os.__file__, str(path))
    assert "\n" not in said


FILES = [
    ("top_level", "dat:\n  group_size: 3\n",
     "Expected a setting of `trace-pl fit` in '{}', line 1, got `dat`. Did you mean `data`?"),
    ("key", "credit:\n  anchor:\n    init_args:\n      turn_wieght: 0.1\n",
     "Expected a setting of callbacks.TraceAnchor in '{}', line 4, got "
     f"`credit.anchor.init_args.turn_wieght`. Did you mean `turn_weight`? {TRACE_ANCHOR}"),
    ("slot", "credit:\n  ancor:\n    class_path: callbacks.TraceAnchor\n",
     "Expected a setting of `credit` in '{}', line 2, got `credit.ancor`. Did you mean `anchor`?"),
    ("trainer", "trainer:\n  max_epoch: 2\n",
     "Expected a setting of `trainer` in '{}', line 2, got `trainer.max_epoch`. "
     "Did you mean `max_epochs`?"),
    ("dataclass", "data:\n  limits:\n    max_turn: 2\n",
     "Expected a setting of trace_pl.rollout.AgentLimits in '{}', line 3, got "
     "`data.limits.max_turn`. Did you mean `max_turns`?"),
    ("class", "credit:\n  backup:\n    class_path: callbacks.NoSuch\n",
     "Expected a Backup at `credit.backup` in '{}', line 2, got 'callbacks.NoSuch', which does "
     f"not exist. {BACKUPS}"),
    ("value", "data:\n  group_size: three\n",
     "Expected a whole number for `data.group_size` in '{}', line 2, got 'three'."),
    ("callback_key",
     "trainer:\n  callbacks:\n    - class_path: callbacks.RunSummary\n"
     "    - class_path: callbacks.RolloutSamples\n      init_args:\n        every: 3\n",
     "Expected a setting of callbacks.RolloutSamples in '{}', line 6, got "
     "`trainer.callbacks.1.init_args.every`. It takes every_n_epochs, num_rollouts."),
    ("beside", "credit:\n  anchor:\n    class_path: callbacks.TraceAnchor\n    turn_weight: 0.3\n",
     "Expected `class_path` and `init_args` at `credit.anchor` in '{}', line 4, got `turn_weight`. "
     "Settings of the class go below `init_args`."),
    ("nothing", "data:\n",
     "Expected settings below `data` in '{}', line 1, got null. It takes task, engine,"),
    ("callback_class", "trainer:\n  callbacks:\n    - class_path: callbacks.RunSumary\n",
     "Expected a Callback at `trainer.callbacks.0` in '{}', line 3, got 'callbacks.RunSumary', "
     "which does not exist. Did you mean `callbacks.RunSummary`? There are:"),
    ("callback_spec", "trainer:\n  callbacks:\n    - class: callbacks.RunSummary\n",
     "Expected `class_path` at `trainer.callbacks.0` in '{}', line 3, got 'class'. "
     "Did you mean `class_path`? There are:"),
    ("twice", "data:\n  group_size: 2\ndata:\n  seed: 4\n",
     "Expected `data` once in '{}', got it in lines 1 and 3. Join the two."),
    ("syntax", "data:\n  hops: [3\nmodel:\n  x: 1\n", "Expected YAML in '{}', got at line 3: "),
    ("list", "- a\n- b\n",
     "Expected settings such as `data:` in '{}', got a list. Begin with a key, or leave the file "
     "out."),
    ("empty", "# nothing yet\n",
     "Expected settings such as `data:` in '{}', got an empty file. Begin with a key, or leave "
     "the file out."),
]  # fmt: skip


@pytest.mark.parametrize(("text", "line"), [each[1:] for each in FILES], ids=[n for n, *_ in FILES])
def test_a_fault_in_a_file_is_one_line_with_its_place(cli, tmp_path, text, line):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    said = complaint(cli, "--config", str(path))
    expected = line.replace("{}", str(path))
    assert said[: len(expected)] == expected
    assert "\n" not in said


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("fitt", "Expected a command first, got 'fitt'. Did you mean `fit`? There are: fit, "),
        ("--config quickstart fit", "Expected a command first, got '--config'. There are: fit, "),
        ("fit --credit.backup callbacks.NoSuch", "Expected a Backup at `credit.backup`"),
        ("plan --gpus two", "Argument --gpus: invalid int value: 'two'. See `trace-pl plan "),
        ("export a", "Expected a value for output, got none. Give it."),
        ("export a b --dtyp float32", "Expected a setting of `trace-pl export` on the command "
         "line, got `dtyp`. Did you mean `dtype`?"),
        ("make-base --recipe.sed 3", "Expected a setting of `recipe` on the command line, got "
         "`recipe.sed`. Did you mean `seed`?"),
        ("configs qwen3_4", "Expected a config file or the name of a shipped config, got "
         "'qwen3_4'. Did you mean `qwen3_4b`?"),
    ],
)  # fmt: skip
def test_every_command_ends_with_one_line_and_exit_code_2(capsys, arguments, line):
    assert run_cli(*arguments.split()) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"trace-pl: error: {line}")


def test_fit_without_a_config_says_where_to_begin(cli):
    with pytest.raises(ConfigError) as caught:
        cli.parse_arguments(cli.parser, [])
    assert str(caught.value) == (
        "Expected a value for data.task, data.engine, got none. Give it, for example by "
        "`--config quickstart`."
    )


@pytest.mark.parametrize("name", shipped_names())
def test_no_fault_is_found_in_a_shipped_config(cli, name):
    if name.endswith("adamw_8bit"):
        pytest.importorskip("torchao")
    slots = slots_of(cli.parser)
    follower = Follower("trace-pl fit")
    (follower.source,) = read_arguments(["--config", str(find_config(name))])
    follower.group(slots, (), (), follower.source.settings)
    if "/" not in name:  # a complete run
        follower.require(slots)

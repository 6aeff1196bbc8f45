"""Each private name of another library that trace_pl uses is there and means what it meant."""

import re
from pathlib import Path

import pytest
from jsonargparse import ArgumentParser
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from torch import distributed
from torch.distributed import HashStore
from transformers import Qwen3Config

from trace_pl import privates

ROOT = Path(__file__).parents[1]
BORROWED = re.compile(
    r"^\s*from (?!trace_pl)\S*\._\w+\S* import|import \S+\._\w+"
    r"|\b(?:parser|logger|action|config)\._\w+|_typehint\b",
    re.M,
)


def test_private_names_are_used_where_it_is_said_why():
    users = [p.name for p in (ROOT / "trace_pl").rglob("*.py") if BORROWED.search(p.read_text())]
    users += [p.name for p in (ROOT / "callbacks").rglob("*.py") if BORROWED.search(p.read_text())]
    assert sorted(users) == ["live_bytes.py", "privates.py"]


def test_what_is_overridden_of_lightnings_command_line_is_there():
    assert callable(LightningCLI._parse_ckpt_path)


def test_a_parser_shows_what_it_takes():
    parser, inner = ArgumentParser(), ArgumentParser()
    inner.add_argument("--tokens", type=int)
    parser.add_subcommands().add_subcommand("fit", inner)
    assert privates.subcommands_of(parser) == {"fit": inner}
    assert privates.subcommands_of(inner) == {}
    assert "tokens" in {action.dest for action in privates.actions_of(inner)}


def test_an_action_shows_the_type_that_it_checks():
    parser = ArgumentParser()
    parser.add_argument("--tokens", type=int | None)
    parser.add_argument("--name")
    hints = {action.dest: privates.hint_of(action) for action in privates.actions_of(parser)}
    assert (hints["tokens"], hints["name"]) == (int | None, None)


def test_a_config_shows_its_attention():
    assert privates.attention_of(Qwen3Config(attn_implementation="eager")) == "eager"


@pytest.mark.parametrize("logger", [TensorBoardLogger, CSVLogger])
def test_a_logger_is_given_its_version(logger, tmp_path):
    made = logger(tmp_path)
    assert not privates.has_version(made)
    privates.set_version(made, 7)
    assert privates.has_version(made)
    assert made.version == 7
    assert made.log_dir.endswith("version_7")


def test_a_csv_logger_writes_by_the_writer_that_it_is_given(tmp_path):
    logger, writer = CSVLogger(tmp_path, version=1), ExperimentWriter(str(tmp_path / "elsewhere"))
    privates.set_writer(logger, writer)
    assert logger.experiment is writer
    logger.log_metrics({"reward": 0.5}, step=3)
    writer.metrics_file_path = str(tmp_path / "table.csv")
    logger.save()
    assert (tmp_path / "table.csv").read_text().splitlines() == ["reward,step", "0.5,3"]


def test_the_store_through_which_ranks_met_gives_clones():
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        store = privates.default_store()
        assert (store.add("taken", 1), privates.default_store().add("taken", 1)) == (1, 2)
    finally:
        distributed.destroy_process_group()


def test_a_size_is_read_as_save_pretrained_reads_it():
    assert privates.num_bytes("2GB") == 2_000_000_000
    with pytest.raises(ValueError, match="big"):
        privates.num_bytes("big")

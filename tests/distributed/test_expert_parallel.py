"""What cannot be dealt is refused before anything is loaded."""

from dataclasses import replace
from datetime import timedelta

import pytest
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from random_models import make_qwen3, make_qwen3_moe
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from trace_pl.distributed.expert_parallel import deal_experts
from trace_pl.distributed.strategy import ShardedStrategy
from trace_pl.errors import ConfigError
from trace_pl.rollout.trajectory import AgentLimits


@pytest.fixture
def three_ranks():
    """The first of three ranks, of which the others do not exist."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=3)
    yield init_device_mesh("cpu", (3,))
    distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (make_qwen3, "Expected a mixture of experts .* got a Qwen3ForCausalLM"),
        (make_qwen3_moe, "to divide the model's 4 experts, got 3"),
    ],
)
def test_models_without_experts_or_with_too_few_are_refused(three_ranks, make, message):
    with pytest.raises(ConfigError, match=message):
        deal_experts(make(), three_ranks)


@pytest.mark.parametrize("size", [0, 3])
def test_ranks_of_one_copy_are_divided_evenly(size):
    strategy = ShardedStrategy(shard_size=4, expert_parallel_size=size)
    strategy.parallel_devices = ["cpu"] * 8
    with pytest.raises(ConfigError, match=rf"expert_parallel_size .* \(4\), got {size}"):
        strategy.mesh_shape()


def test_a_mesh_of_other_ranks_than_were_started_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    strategy = ShardedStrategy(shard_size=2)
    strategy.parallel_devices = ["cpu"] * 2
    strategy.cluster_environment = TorchElasticEnvironment()
    strategy.num_nodes = 2
    assert strategy.mesh_shape() == (2, 2)
    strategy.num_nodes = 1
    with pytest.raises(ConfigError, match=r"of the 4 ranks that were started, got 2 x 1\. Correct"):
        strategy.mesh_shape()


def test_ranks_wait_for_the_slowest_rollout_that_counts():
    limits = AgentLimits(max_turns=60, tool_timeout_s=20.0, tool_retries=1)
    assert limits.slowest_s == 60 * 20 * 2 + 60 * 2
    strategy = ShardedStrategy()
    strategy.wait_for(limits.slowest_s)
    assert strategy._timeout == timedelta(seconds=2520 + 1800)
    assert replace(limits, max_seconds=100.0).slowest_s == 100.0
    with pytest.raises(ConfigError, match=r"timeout_s of at least 2520, got 600: .*max_seconds"):
        ShardedStrategy(timeout_s=600.0).wait_for(limits.slowest_s)

"""What ranks exchange to make equal numbers of forwards."""

import pytest
import torch

from trace_pl.distributed.padding import exchange_device


@pytest.mark.parametrize(
    ("backends", "device"),
    [
        ("cuda:nccl", "cuda"),  # of a run on GPUs whose reference rests in main memory
        ("cpu:gloo,cuda:nccl", "cpu"),
        ("cpu:gloo", "cpu"),
    ],
)
def test_a_count_lies_where_the_group_can_exchange_it(backends, device):
    assert exchange_device(backends) == torch.device(device)

import gather_ranks
import torch
from processes import Ranks

from trace_pl.models.weights import full_tensors


def test_two_ranks_gather_ragged_packed_and_adapted_weights():
    Ranks(2, gather_ranks.main).finish()


def test_a_tensor_that_is_not_sharded_is_not_copied():
    tensor = torch.ones(3)
    ((name, found),) = full_tensors([("a", tensor)])
    assert name == "a"
    assert found is tensor

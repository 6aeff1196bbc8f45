import pytest
from builders import question, rollout

from trace_pl.credit.boundaries import tool_call_boundaries
from trace_pl.errors import CreditError
from trace_pl.types import Rollout


def test_boundaries_follow_the_prompt_and_each_observation():
    """Prompt 4; a turn is one header, its action, one closing, its observation, one closing."""
    boundaries = tool_call_boundaries(rollout(prompt=4, turns=[(3, 2), (1, 5)], final=2))
    assert boundaries.prefix_ends == (4, 12, 21)
    assert boundaries.rollout_id == "q0/0"
    assert boundaries.num_turns == 2


def test_a_direct_answer_has_the_prompt_boundary_alone():
    assert tool_call_boundaries(rollout(prompt=6, turns=[], final=3)).prefix_ends == (6,)


def test_a_cut_last_response_is_no_transition():
    """The tokens after the last observation are the same whether they answer or were cut."""
    cut = rollout(prompt=4, turns=[(3, 2)], final=40)
    assert tool_call_boundaries(cut).prefix_ends == (4, 12)


def test_an_observation_beyond_the_record_is_refused_with_the_rollout():
    whole = rollout(index=3, prompt=4, turns=[(3, 2)], of=question(7))
    broken = Rollout(
        **{
            **vars(whole),
            "token_ids": whole.token_ids[:9],
            "kinds": whole.kinds[:9],
            "logprobs": whole.logprobs[:9],
        }
    )
    with pytest.raises(CreditError, match="9 tokens of rollout q7/3, got one that ends at 12"):
        tool_call_boundaries(broken)

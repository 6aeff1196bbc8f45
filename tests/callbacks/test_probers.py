import pytest
import torch
from builders import group, rollout
from jsonargparse import ArgumentParser
from lookup_scorer import LetterTemplate, LookupScorer

from callbacks import FrozenReferenceProber, NoProber
from trace_pl.credit.boundaries import tool_call_boundaries
from trace_pl.credit.stages import Prober
from trace_pl.credit.values import LinearGapValue, LogRatioValue, RawLogprobValue
from trace_pl.errors import ConfigError, CreditError
from trace_pl.types import Boundaries, Question

TWO_ANSWERS = Question("q5", "Which?", ("Ur", "Uruk"))
SCORES = torch.tensor([[-4.0, -6.0], [-3.0, -1.0], [-2.0, -2.5]])


def probe(prober, scores=SCORES):
    """Probe one rollout of two turns of the question with two accepted answers."""
    asked = rollout(turns=[(2, 2)] * (len(scores) - 1), of=TWO_ANSWERS)
    scorer = LookupScorer({asked.id: scores})
    (values,) = prober.probe([asked], [tool_call_boundaries(asked)], scorer, LetterTemplate())
    return values, scorer.requests[0]


@pytest.mark.parametrize(
    ("aliases", "expected"),
    [
        ("max", [-4.0, -1.0, -2.0]),
        ("mean", [-5.0, -2.0, -2.25]),
        # Two and four tokens: the log of exp(2 * first) + exp(4 * second).
        ("total", [-8.0, -3.873072, -3.997524]),
    ],
)
def test_aliases_are_reduced_at_each_prefix(aliases, expected):
    values, _ = probe(FrozenReferenceProber(aliases=aliases))
    torch.testing.assert_close(values.mean_logprobs, torch.tensor(expected), atol=1e-6, rtol=0.0)


def test_first_alias_alone_is_scored_when_it_alone_counts():
    values, request = probe(FrozenReferenceProber(aliases="first"), SCORES[:, :1])
    assert [branch.answer_ids for branch in request.branches] == [tuple(map(ord, "Ur"))]
    torch.testing.assert_close(values.mean_logprobs, SCORES[:, 0], atol=0.0, rtol=0.0)


def test_every_alias_is_asked_after_the_opening_at_every_boundary():
    _, request = probe(FrozenReferenceProber(opening="A: "))
    assert [branch.answer_ids for branch in request.branches] == [
        tuple(map(ord, "Ur")),
        tuple(map(ord, "Uruk")),
    ]
    assert {branch.opening_ids for branch in request.branches} == {tuple(map(ord, "A: "))}
    assert request.prefix_ends == (4, 11, 18)


def test_default_value_is_the_log_ratio():
    """Best answers -4, -1, -2, so log(4.1 / 1.1) and log(4.1 / 2.1)."""
    values, _ = probe(FrozenReferenceProber())
    expected = torch.tensor([0.0, 1.315677, 0.669050])
    torch.testing.assert_close(values.values, expected, atol=1e-5, rtol=0.0)


def test_another_value_is_another_setting():
    values, _ = probe(FrozenReferenceProber(value=RawLogprobValue()))
    torch.testing.assert_close(values.values, torch.tensor([0.0, 3.0, 2.0]), atol=0.0, rtol=0.0)


def test_answers_of_a_group_are_rendered_once():
    class CountingTemplate(LetterTemplate):
        count = 0

        def render(self, opening, answer, inside=False):
            self.count += 1
            return super().render(opening, answer, inside)

    asked = group([1.0, 0.0, 0.0])
    template = CountingTemplate()
    table = {item.id: torch.zeros(item.num_turns + 1, 1) for item in asked.rollouts}
    FrozenReferenceProber().probe(
        asked.rollouts,
        [tool_call_boundaries(item) for item in asked.rollouts],
        LookupScorer(table),
        template,
    )
    assert template.count == 1


@pytest.mark.parametrize("bad", [float("nan"), 0.5])
def test_a_score_that_is_no_logprob_is_refused_with_rollout_and_boundary(bad):
    with pytest.raises(CreditError, match="boundary 1 of rollout q5/0"):
        probe(FrozenReferenceProber(), torch.tensor([[-1.0], [bad]]))


def test_an_unknown_alias_rule_is_refused():
    with pytest.raises(ConfigError, match="'max', 'first', 'mean'"):
        FrozenReferenceProber(aliases="best")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, LogRatioValue(0.1)),
        ({"value": {"class_path": "trace_pl.credit.RawLogprobValue"}}, RawLogprobValue()),
        (
            {
                "value": {
                    "class_path": "trace_pl.credit.LinearGapValue",
                    "init_args": {"epsilon": 0.3},
                }
            },
            LinearGapValue(0.3),
        ),
    ],
)
def test_a_config_picks_the_value_by_class_path(config, expected):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Prober, "prober")
    chosen = {"class_path": "callbacks.FrozenReferenceProber", "init_args": config}
    built = parser.instantiate(parser.parse_object({"prober": chosen}))
    assert built.prober.value == expected


def test_a_boundary_in_the_middle_of_a_message_is_asked_where_it_stands():
    """Prompt, one turn of 3 tokens cut after its second, then the observation."""
    asked = rollout(turns=[(3, 2)], prompt=4, of=TWO_ANSWERS)
    ends = Boundaries(asked.id, (4, 7, asked.turns[0].observation_stop))

    class ByPlace(LookupScorer):
        def score(self, requests):
            self.requests.extend(requests)
            inside = [request.branches[0].opening_ids[0] == ord("|") for request in requests]
            assert inside == [False, True]
            return [torch.tensor([[-4.0], [-1.0]]), torch.tensor([[-2.0]])]

    scorer = ByPlace({})
    prober = FrozenReferenceProber(aliases="first")
    (values,) = prober.probe([asked], [ends], scorer, LetterTemplate())
    assert [request.prefix_ends for request in scorer.requests] == [(4, ends.prefix_ends[2]), (7,)]
    assert values.mean_logprobs.tolist() == [-4.0, -2.0, -1.0]


def test_without_a_prober_all_values_are_zero():
    asked = rollout(turns=[(2, 2), (1, 1)])
    (values,) = NoProber().probe(
        [asked], [tool_call_boundaries(asked)], LookupScorer({}), LetterTemplate()
    )
    assert values.values.tolist() == [0.0, 0.0, 0.0]

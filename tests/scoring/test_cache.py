import pytest
import torch
from random_models import VOCAB, make_qwen3

from trace_pl.errors import ConfigError
from trace_pl.probes import Branch, ProbeRequest
from trace_pl.scoring import BranchedScorer, CachedScorer, ScoreStore

ANSWERS = (Branch((1, 2), (3, 4)), Branch((1,), (5,)))


class Counting:
    """A scorer that remembers what it was asked."""

    def __init__(self):
        self.scorer = BranchedScorer(make_qwen3())
        self.asked = []

    def score(self, requests):
        self.asked += [(request.rollout_id, request.prefix_ends) for request in requests]
        return self.scorer.score(requests)


def two_rollouts_with_one_beginning():
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(0, VOCAB, (30,), generator=generator)
    second = torch.cat([first[:14], (first[14:] + 1) % VOCAB])
    return [
        ProbeRequest("q/0", first, (5, 12, 20, 30), ANSWERS),
        ProbeRequest("q/1", second, (5, 12, 25), ANSWERS),
    ]


def test_what_the_rollouts_of_a_group_share_is_scored_once():
    inner = Counting()
    cached = CachedScorer(inner, ScoreStore())
    requests = two_rollouts_with_one_beginning()
    found = cached.score(requests)
    assert inner.asked == [("q/0", (5, 12, 20, 30)), ("q/1", (25,))]
    assert (cached.num_asked, cached.num_scored) == (7, 5)
    for one, other in zip(found, inner.scorer.score(requests), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_a_replay_in_a_new_process_scores_nothing(tmp_path):
    requests = two_rollouts_with_one_beginning()
    store = ScoreStore(tmp_path / "scores.sqlite")
    first = CachedScorer(Counting(), store, "model").score(requests)
    store.close()
    inner = Counting()
    again = CachedScorer(inner, ScoreStore(tmp_path / "scores.sqlite"), "model").score(requests)
    assert inner.asked == []
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("change", ["answers", "model", "tokens"])
def test_another_answer_model_or_token_is_another_score(change):
    inner, store = Counting(), ScoreStore()
    request = two_rollouts_with_one_beginning()[0]
    CachedScorer(inner, store, "model").score([request])
    ids, answers, name = request.token_ids.clone(), ANSWERS, "model"
    if change == "tokens":
        ids[0] += 1
    elif change == "answers":
        answers = ANSWERS[::-1]
    else:
        name = "later model"
    inner.asked.clear()
    CachedScorer(inner, store, name).score([ProbeRequest("q/0", ids, (5, 12), answers)])
    assert inner.asked == [("q/0", (5, 12))]


def test_a_prefix_is_not_taken_for_its_neighbour():
    """Boundaries are told apart by what was read, not by how it was cut."""
    inner, store = Counting(), ScoreStore()
    ids = torch.arange(1, 31)
    scorer = CachedScorer(inner, store)
    scorer.score([ProbeRequest("q/0", ids, (10, 20), ANSWERS)])
    scorer.score([ProbeRequest("q/1", ids, (5, 20, 30), ANSWERS)])
    assert inner.asked == [("q/0", (10, 20)), ("q/1", (5, 30))]


def test_a_file_that_is_no_store_is_named(tmp_path):
    path = tmp_path / "scores.sqlite"
    path.write_bytes(b"x" * 4096)
    with pytest.raises(ConfigError, match=r"scores\.sqlite.*Delete the file"):
        ScoreStore(path)

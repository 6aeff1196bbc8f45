import pytest
from torch.distributed import HashStore, PrefixStore

from trace_pl.distributed.exchange import exchange
from trace_pl.distributed.question_queue import QuestionQueue


def shared(store, num_questions=5, num_ranks=2, enough=None):
    return [QuestionQueue(num_questions, store, num_ranks, enough) for _ in range(num_ranks)]


def test_ranks_take_every_question_once_in_order():
    first, second = shared(HashStore())
    taken = [first.take(), first.take(), second.take(), first.take(), second.take()]
    assert taken == [0, 1, 2, 3, 4]
    assert (first.take(), second.take(), first.take()) == (None, None, None)
    assert not first.has_enough()


def test_no_rank_holds_more_than_its_share_of_the_questions():
    assert [QuestionQueue(5, num_ranks=n).fair_share for n in (1, 2, 4, 8)] == [5, 3, 2, 1]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_usable_groups_are_counted_over_all_ranks_and_none_too_many(num_ranks, monkeypatch):
    monkeypatch.setattr("trace_pl.distributed.question_queue._LOOK_S", 0.0)
    queues = shared(HashStore(), num_ranks=num_ranks, enough=2)
    first, last = queues[0], queues[-1]
    assert first.count()
    assert not first.has_enough()
    assert last.count()
    assert first.has_enough()
    assert last.has_enough()
    assert not first.count()  # it was complete before this rank knew


def test_the_last_rank_to_leave_clears_the_store():
    store = HashStore()
    first, second = shared(PrefixStore("questions-7", store), enough=1)
    for queue in (first, second):
        queue.take()
        queue.count()
    first.close()
    assert store.num_keys() == 3
    assert first.take() is None
    second.close()
    assert store.num_keys() == 0


def test_alone_a_parcel_comes_back_as_it_is():
    thing = object()
    assert exchange([[thing]]) == [thing]

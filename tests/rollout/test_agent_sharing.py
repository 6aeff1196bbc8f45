"""Agent loops that share their questions."""

from agent_runs import ANSWER, make_loop, question
from scripted import search
from torch.distributed import HashStore

from trace_pl.distributed.question_queue import QuestionQueue

QUESTIONS = [question(f"q{i}") for i in range(6)]
SCRIPT = {"*": [search("a"), search("b"), ANSWER]}


def asked(engine):
    return list(dict.fromkeys(request.stream.split("/")[1] for request in engine.requests))


def tokens(groups):
    return {
        (position, r.index): r.token_ids.tolist()
        for position, group in groups
        for r in group.rollouts
    }


def test_a_loop_takes_another_question_when_its_engine_has_room():
    engine, loop = make_loop(SCRIPT)
    engine.max_num_seqs = 3
    seen = []
    engine.is_held = lambda rollout, step: rollout.startswith("q0") and len(asked(engine)) < 5
    stream = loop.stream(QUESTIONS, 2, lambda counts: seen.append(counts.total - counts.finished))
    order = [position for position, _ in stream]
    assert asked(engine) == [f"q{i}" for i in range(6)]
    assert order[0] > 0  # the first is slow
    assert sorted(order) == list(range(6))
    assert max(seen) == 4  # rollouts on their way, for an engine that works on three


def test_a_slow_rank_asks_less_and_the_rollouts_are_those_of_one_rank():
    engine, loop = make_loop(SCRIPT)
    everything = tokens(loop.stream(QUESTIONS, 2))
    store, found, engines, streams = HashStore(), [], [], []
    for _ in range(2):
        engine, loop = make_loop(SCRIPT)
        engine.max_num_seqs = 2
        engines.append(engine)
        streams.append(loop.stream(QUESTIONS, 2, queue=QuestionQueue(6, store, 2)))
    slow, fast = streams
    engines[0].is_held = lambda rollout, step: len(asked(engines[1])) < 4 and step % 50 > 0
    found = [next(slow)]
    found += list(fast)
    found += list(slow)
    assert tokens(found) == everything
    assert len(asked(engines[0])) + len(asked(engines[1])) == 6


def test_a_loop_whose_questions_were_all_taken_by_others_finds_nothing():
    _, loop = make_loop(SCRIPT)
    store = HashStore()
    store.add("taken", 6)
    assert list(loop.stream(QUESTIONS, 2, queue=QuestionQueue(6, store, 2))) == []

import pytest
from builders import question

from trace_pl.errors import ConfigError
from trace_pl.tasks.stream import QuestionStream

QUESTIONS = [question(number) for number in range(7)]


def ids(questions):
    return [q.id for q in questions]


def test_every_pass_asks_everything_once_in_an_order_of_its_own():
    stream = QuestionStream(QUESTIONS, seed=1)
    asked = ids(stream.take(3)) + ids(stream.take(9)) + ids(stream.take(2))
    first, second = asked[:7], asked[7:]
    assert sorted(first) == sorted(second) == ids(QUESTIONS)
    assert first != second
    assert asked == ids(QuestionStream(QUESTIONS, seed=1).take(14))
    assert asked != ids(QuestionStream(QUESTIONS, seed=2).take(14))


def test_a_loaded_stream_goes_on_where_the_saved_one_stood():
    stream = QuestionStream(QUESTIONS, seed=1)
    stream.take(5)
    resumed = QuestionStream(QUESTIONS, seed=1)
    resumed.load_state_dict(stream.state_dict())
    assert ids(resumed.take(6)) == ids(stream.take(6))


def test_a_position_in_other_questions_is_refused():
    stream = QuestionStream(QUESTIONS, seed=1)
    with pytest.raises(ConfigError, match="training questions of the checkpoint"):
        stream.load_state_dict(QuestionStream(QUESTIONS[1:], seed=1).state_dict())


def test_questions_that_are_put_back_come_first_and_are_saved():
    stream = QuestionStream(QUESTIONS, seed=1)
    asked = stream.take(4)
    stream.put_back(asked[2:])
    resumed = QuestionStream(QUESTIONS, seed=1)
    resumed.load_state_dict(stream.state_dict())
    for each in (stream, resumed):
        again = ids(each.take(5))
        assert again[:2] == ids(asked[2:])
        assert sorted(ids(asked[:2]) + again) == ids(QUESTIONS)


def test_a_checkpoint_without_returned_questions_is_read():
    stream = QuestionStream(QUESTIONS, seed=1)
    stream.take(2)
    state = stream.state_dict()
    del state["returned"]
    resumed = QuestionStream(QUESTIONS, seed=1)
    resumed.load_state_dict(state)
    assert ids(resumed.take(3)) == ids(stream.take(3))


@pytest.mark.parametrize("count", [4, 5, 6, 7])
def test_no_question_comes_twice_at_once_and_none_is_left_out(count):
    stream = QuestionStream(QUESTIONS, seed=1)
    takes = [ids(stream.take(count)) for _ in range(7)]
    assert all(len(set(take)) == count for take in takes)
    asked = [id_ for take in takes for id_ in take]
    assert {asked.count(id_) for id_ in ids(QUESTIONS)} <= {count - 1, count, count + 1}

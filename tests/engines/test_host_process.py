import os
import random

import numpy as np
import pytest
import torch

from trace_pl.engines.vllm.host_process import guest_compute, kept_state, quiet_output
from trace_pl.errors import ConfigError


def talk():
    os.write(1, b"native out\n")
    os.write(2, b"native err\n")


def fail_quietly(error):
    with quiet_output(is_quiet=True):
        talk()
        raise error


def fail_as_guest(num_threads):
    with guest_compute(num_threads, is_eager=True):
        assert torch.get_num_threads() == num_threads
        torch.rand(1)
        raise KeyError


def test_a_quiet_start_prints_nothing(capfd):
    with quiet_output(is_quiet=True):
        talk()
    os.write(1, b"after\n")
    assert capfd.readouterr() == ("after\n", "")


def test_an_unexpected_failure_shows_what_was_hidden(capfd):
    with pytest.raises(RuntimeError):
        fail_quietly(RuntimeError())
    assert "native err" in capfd.readouterr().err


def test_an_error_meant_for_users_stands_alone(capfd):
    with pytest.raises(ConfigError):
        fail_quietly(ConfigError("Expected x, got y."))
    assert capfd.readouterr() == ("", "")


def test_nothing_is_hidden_on_request(capfd):
    with quiet_output(is_quiet=False):
        os.write(1, b"native out\n")
    assert capfd.readouterr().out == "native out\n"


def test_random_states_and_thread_count_survive_a_start():
    def draw():
        return torch.rand(1).item(), random.random(), np.random.rand()

    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    expected = draw()
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])
    before = torch.get_num_threads()
    with kept_state():
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        torch.set_num_threads(before + 1)
        torch.set_num_threads = lambda number: None
    assert draw() == expected
    assert torch.get_num_threads() == before
    torch.set_num_threads(before + 1)
    assert torch.get_num_threads() == before + 1
    torch.set_num_threads(before)


def test_a_guests_step_ends_even_when_it_fails():
    before = torch.get_num_threads()
    state = torch.get_rng_state()
    with pytest.raises(KeyError):
        fail_as_guest(before + 2)
    assert torch.get_num_threads() == before
    assert torch.equal(torch.get_rng_state(), state)

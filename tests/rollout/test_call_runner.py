import threading
import time

from trace_pl.rollout.call_runner import CallRunner
from trace_pl.types import ToolResult


def outcomes(runner, count, within_s=5.0):
    """Poll until ``count`` outcomes are in."""
    found = []
    deadline = time.monotonic() + within_s
    while len(found) < count and time.monotonic() < deadline:
        found += runner.poll(0.01)
    return {outcome.key: outcome for outcome in found}


def test_calls_run_at_the_same_time():
    barrier = threading.Barrier(4)
    runner = CallRunner(num_threads=4, timeout_s=5.0, num_retries=0)
    for i in range(4):
        runner.submit(f"k{i}", lambda: ToolResult(str(barrier.wait(5.0) >= 0)))
    found = outcomes(runner, 4)
    runner.close()
    assert {key: outcome.result.text for key, outcome in found.items()} == {
        f"k{i}": "True" for i in range(4)
    }


def test_a_failure_is_retried_and_then_reported():
    calls = []

    def fail():
        calls.append(1)
        raise ConnectionError("service is down")

    runner = CallRunner(num_threads=1, timeout_s=5.0, num_retries=2)
    runner.submit("k", fail)
    outcome = outcomes(runner, 1)["k"]
    runner.close()
    assert len(calls) == 3
    assert outcome.result is None
    place = f"in '{__file__}', line {fail.__code__.co_firstlineno + 2}"
    assert outcome.failure == f"ConnectionError: service is down {place}"


def test_a_call_that_hangs_is_abandoned_and_its_late_result_dropped():
    release = threading.Event()
    calls = []

    def hang_once():
        calls.append(1)
        if len(calls) == 1:
            release.wait(5.0)
            return ToolResult("late")
        return ToolResult("in time")

    runner = CallRunner(num_threads=1, timeout_s=0.05, num_retries=1)
    runner.submit("k", hang_once)
    assert outcomes(runner, 1)["k"].result.text == "in time"
    release.set()
    assert outcomes(runner, 1, within_s=0.2) == {}
    assert runner.num_pending == 0
    runner.close()


def test_hung_calls_do_not_use_up_the_threads():
    release = threading.Event()
    runner = CallRunner(num_threads=2, timeout_s=0.05, num_retries=0)
    for i in range(6):
        runner.submit(f"hung{i}", lambda: ToolResult(str(release.wait(5.0))))
    failures = outcomes(runner, 6)
    runner.submit("quick", lambda: ToolResult("done"))
    quick = outcomes(runner, 1)["quick"]
    release.set()
    runner.close()
    assert {o.failure for o in failures.values()} == {"no result within 0.05 s"}
    assert quick.result.text == "done"


def test_waiting_for_a_thread_does_not_count_as_running():
    runner = CallRunner(num_threads=1, timeout_s=0.25, num_retries=0)
    for i in range(4):
        runner.submit(f"k{i}", lambda: (time.sleep(0.1), ToolResult("done"))[1])
    found = outcomes(runner, 4)
    runner.close()
    assert [found[f"k{i}"].failure for i in range(4)] == [None] * 4


def test_a_cancelled_call_gives_nothing_and_frees_its_thread():
    release, started = threading.Event(), threading.Event()

    def hang():
        started.set()
        release.wait(5.0)
        return ToolResult("late")

    runs = []
    runner = CallRunner(num_threads=1, timeout_s=5.0, num_retries=1)
    runner.submit("hung", hang)
    runner.submit("queued", lambda: runs.append(1) or ToolResult("never"))
    assert started.wait(5.0)
    runner.cancel(["hung", "queued", "unknown"])
    assert runner.num_pending == 0
    runner.submit("quick", lambda: ToolResult("done"))
    assert outcomes(runner, 1)["quick"].result.text == "done"
    # The same name may come again: what the old call brings later does not answer the new one.
    runner.submit("hung", lambda: ToolResult(str(release.wait(5.0))))
    release.set()
    assert outcomes(runner, 1)["hung"].result.text == "True"
    assert outcomes(runner, 1, within_s=0.1) == {}
    assert runs == []
    runner.close()


def test_a_closed_runner_runs_nothing_more_and_its_threads_end():
    release, started, runs = threading.Event(), threading.Event(), []
    before = set(threading.enumerate())
    runner = CallRunner(num_threads=1, timeout_s=5.0, num_retries=0)
    runner.submit("busy", lambda: (started.set(), ToolResult(str(release.wait(5.0))))[1])
    runner.submit("queued", lambda: runs.append(1) or ToolResult("never"))
    assert started.wait(5.0)
    runner.close()
    release.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(5.0)
        assert not thread.is_alive()
    assert runs == []

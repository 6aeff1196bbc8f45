"""The data module pulls weights when the engine has not the policy's, and lets it sleep between."""

from types import SimpleNamespace

from trace_pl.engines.transformers import HFEngine
from trace_pl.rollout.chat.answer_formats import AnswerTags
from trace_pl.rollout.trajectory import AgentLimits
from trace_pl.tasks.closed_web.task import ClosedWebTask
from trace_pl.training.datamodule import RolloutDataModule
from trace_pl.training.module import TraceModule


class DrowsyEngine(HFEngine):
    """Samples as ever and forgets its version in its sleep, as an engine without weights does."""

    def __init__(self, model, forgets):
        super().__init__(model, 1024)
        self.forgets = forgets
        self.calls = []

    def submit(self, request):
        self.calls += ["sample"] if self.calls[-1:] != ["sample"] else []
        super().submit(request)

    def push_weights(self, named_tensors, version):
        self.calls.append(f"push {version}")
        super().push_weights(named_tensors, version)

    def sleep(self):
        self.calls.append("sleep")
        if self.forgets:
            self.version = -1


def collect_twice(forgets):
    data = RolloutDataModule(
        ClosedWebTask((2,)),
        lambda path: DrowsyEngine(path, forgets),
        limits=AgentLimits(2, 20, 600),
        answer_format=AnswerTags(instruction=""),  # the built-in model knows them
    )
    module = TraceModule()
    module.configure_model()
    data.open()
    data.trainer = SimpleNamespace(lightning_module=module)
    questions = data.agent.task.questions("validation")[:1]
    for _ in range(2):
        data.push_weights()
        data.collector.collect(questions, 1, "test")
    assert data.parity.max_abs_diff < 1e-4
    return data.collector.loop.engine.calls


def test_an_engine_that_slept_is_given_the_same_weights_again():
    once = ["push 0", "sample", "sleep"]
    assert collect_twice(forgets=True) == once + once


def test_an_engine_that_kept_its_weights_is_not():
    assert collect_twice(forgets=False) == ["push 0", "sample", "sleep", "sample", "sleep"]

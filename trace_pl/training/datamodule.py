"""The DataModule: questions in, fresh rollouts out, once per epoch. It knows nothing of credit."""

from __future__ import annotations

import time
from typing import Any, Literal

import lightning
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader

from trace_pl.errors import ConfigError
from trace_pl.models.names import BUILT_IN_BASE
from trace_pl.rollout.chat.answer_formats import AnswerFormat, AnswerTags
from trace_pl.rollout.chat.call_formats import HermesFormat, ToolCallFormat
from trace_pl.rollout.chat.template import ChatTemplate
from trace_pl.rollout.collector import Collector
from trace_pl.rollout.grading import Reward
from trace_pl.rollout.parity import ParityReport
from trace_pl.rollout.trajectory import AgentLimits
from trace_pl.tasks.asked import AskedQuestions
from trace_pl.tasks.protocol import Split, Task
from trace_pl.tasks.rewards import ExactMatchReward
from trace_pl.tasks.stream import QuestionStream
from trace_pl.tools.protocol import Toolbox
from trace_pl.training.agent_setup import AgentSetup, EngineFactory
from trace_pl.training.buffer import RolloutBuffer
from trace_pl.training.epoch_plan import EpochPlan
from trace_pl.training.minibatch import EvaluationBatch, OneBatch
from trace_pl.training.row_plan import BatchPlan, deal_groups
from trace_pl.training.trainer_checks import check_trainer, require_first_devices
from trace_pl.types import RolloutGroup


class RolloutDataModule(lightning.LightningDataModule):
    """Streams fresh rollouts: every epoch pulls the policy's weights and samples new trajectories.

    Args:
        task: Questions and tools.
        engine: Given the model's folder, makes the sampling engine.
        model_name: The policy's model, for its tokenizer and the engine's configuration.
        group_size: Rollouts of each question (G).
        questions_per_epoch: Questions of each rollout phase, of all ranks together.
        extra_questions: Questions started beyond those. The phase ends when ``questions_per_epoch``
            groups are complete; the others are cancelled and asked first in the next epoch, so
            nobody waits for the slowest trajectories. The price: which groups are complete first
            depends on the clock, so neither a second run nor a resumed one gives the same rollouts,
            and questions that end quickly are trained on more often. 0 keeps runs reproducible.
        num_steps: Optimizer steps per pass over an epoch's rollouts.
        num_passes: Passes over an epoch's rollouts.
        tokens_per_forward: Most tokens of one training forward and backward pass. An optimizer step
            is split into as many as it needs; the gradient is that of one.
        limits: Bounds of one rollout.
        call_format: How the policy writes tool calls; None means Qwen's Hermes form.
        answer_format: How the policy states its final answer: what the system prompt says of it,
            how it is read, and what a prober puts before the gold answer. None means `<answer>`
            tags.
        reward: Grades finished rollouts, a class or a function; None means normalised exact match.
        system_prompt: Put before the instruction of the answer format and before the tools'
            description.
        evaluation_questions: Questions of each validation, the first of the split, one rollout
            each; None takes all.
        test_questions: The same for ``test`` and ``predict``.
        parity_tolerance: Largest allowed difference, in nats, between engine and trainer on the
            log-probs of a fixed prompt after each weight push. None limits its mean and its 99th
            percentile instead, to what the number formats of both sides and the model's depth
            explain, and leaves a warning of the largest to ``callbacks.HealthMonitor``.
        seed: Orders the questions.
        max_staleness: 1 collects the rollouts of the next epoch while this one trains: they come
            from the weights before its steps, and the loss weighs them for that. The engine has to
            run in a process of its own. A resumed run collects what was under way anew, from newer
            weights. 0 trains on nothing but the newest policy's rollouts.
        tools: What the policy may call; None means the tools of the task.
    """

    def __init__(
        self,
        task: Task,
        engine: EngineFactory,
        model_name: str = BUILT_IN_BASE,
        group_size: int = 8,
        questions_per_epoch: int = 16,
        num_steps: int = 1,
        num_passes: int = 1,
        tokens_per_forward: int = 16_384,
        limits: AgentLimits | None = None,
        call_format: ToolCallFormat | None = None,
        answer_format: AnswerFormat | None = None,
        reward: Reward | None = None,
        system_prompt: str = "",
        evaluation_questions: int | None = 128,
        parity_tolerance: float | None = None,
        seed: int = 0,
        extra_questions: int = 0,
        max_staleness: Literal[0, 1] = 0,
        test_questions: int | None = None,
        tools: Toolbox | None = None,
    ) -> None:
        """Store settings; nothing heavy happens before :meth:`open`.

        Raises:
            ConfigError: if a count or the tolerance is too small.
        """
        super().__init__()
        for name, count in (("evaluation", evaluation_questions), ("test", test_questions)):
            if count is not None and count < 1:
                raise ConfigError(f"Expected data.{name}_questions of at least 1, got {count}.")
        if parity_tolerance is not None and not parity_tolerance >= 0:
            raise ConfigError(
                f"Expected data.parity_tolerance of at least 0, got {parity_tolerance}."
            )
        self.epoch_plan = EpochPlan(group_size, questions_per_epoch, extra_questions, max_staleness)
        limits = limits or AgentLimits()
        longest = limits.max_trajectory_tokens
        self.plan = BatchPlan(num_steps, num_passes, tokens_per_forward, seed, longest)
        self.agent = AgentSetup(
            task,
            model_name,
            limits,
            call_format or HermesFormat(),
            answer_format or AnswerTags(),
            reward or ExactMatchReward(),
            system_prompt,
            tools,
        )
        self.make_engine = engine
        self.parity_tolerance = parity_tolerance
        self.asked = AskedQuestions(
            task,
            at_least=self.epoch_plan.questions_asked,
            at_most={"validation": evaluation_questions, "test": test_questions},
        )
        self.restarts_questions = False  # set for a run that goes on with another task
        self._buffer: RolloutBuffer | None = None
        self.rollout_seconds = 0.0
        self._stream = QuestionStream([], seed)
        self._before_ahead: dict[str, Any] | None = None
        self._collector: Collector | None = None

    # --- set-up -----------------------------------------------------------------------------

    def open(self, stage: str = "fit", num_ranks: int = 1, starts_engine: bool = True) -> None:
        """Load and check everything a run stands on; what was done before is not done again.

        The command line calls this before the Trainer creates a run folder, so that a mistake costs
        seconds and leaves nothing behind.

        Args:
            stage: What is run, which says the questions that are needed.
            num_ranks: Processes that share the questions.
            starts_engine: Whether to start the engine as well. One inside a process that is one of
                several ranks has to wait until they have met.
        """
        is_fit = stage == "fit"
        if is_fit:
            self.epoch_plan.require_question_for_each(num_ranks)
        self.asked.read(stage, num_ranks, self.agent.check)
        if is_fit:
            self._stream.questions = self.asked.questions("train")
        if starts_engine and self._collector is None:
            loop = self.agent.start(self.make_engine, self.epoch_plan.max_staleness > 0)
            self._collector = Collector(loop, self.parity_tolerance)

    def setup(self, stage: str) -> None:
        """Open the data and check it against the Trainer."""
        if self.trainer is not None:
            check_trainer(vars(self.trainer), stage)
            require_first_devices(self.trainer.device_ids)
        self.open(stage, self.trainer.world_size if self.trainer else 1)

    @property
    def collector(self) -> Collector:
        """What samples rollouts, made by :meth:`open`."""
        assert self._collector is not None, "open() makes the collector"
        return self._collector

    @property
    def parity(self) -> ParityReport | None:
        """How far engine and trainer were apart after the last weight push."""
        return self.collector.parity

    def teardown(self, stage: str) -> None:
        """Stop the engine when the last use of it is over."""
        if self.trainer is not None:
            self.trainer.accumulate_grad_batches = 1
        if self._collector is not None:
            self._collector.close()
            self._collector = None

    def on_exception(self, exception: BaseException) -> None:
        """Stop the engine of a run that failed or was interrupted."""
        self.teardown("exception")

    @property
    def template(self) -> ChatTemplate:
        """The policy's chat template."""
        return self.agent.template

    @property
    def buffer(self) -> RolloutBuffer:
        """The rollouts of this epoch, made with its loader."""
        assert self._buffer is not None, "train_dataloader() makes the buffer"
        return self._buffer

    # --- rollouts ---------------------------------------------------------------------------

    def push_weights(self) -> None:
        """Copy the policy into the engine.

        The data module asks for it because on resume ``train_dataloader`` runs before any training
        hook.
        """
        assert self.trainer is not None, "weights are those of a Trainer's module"
        self.collector.push_weights(self.trainer.lightning_module)

    def _epoch_groups(self) -> dict[int, RolloutGroup]:
        """Return the rollouts of this epoch, and begin those of the next if that is wanted."""
        if self.collector.is_ahead:
            groups, _ = deal_groups(self.collector.finish())
        else:
            groups = self._sample_epoch()
        self._before_ahead = None
        if self.epoch_plan.max_staleness and not self._is_last_epoch():
            self.push_weights()
            self._before_ahead = self._stream.state_dict()
            questions = self._stream.take(self.epoch_plan.questions_per_epoch)
            self.collector.start(questions, self.epoch_plan.group_size)
        return groups

    def _is_last_epoch(self) -> bool:
        assert self.trainer is not None, "epochs are a Trainer's"
        return self.trainer.current_epoch + 1 == self.trainer.max_epochs

    def _sample_epoch(self) -> dict[int, RolloutGroup]:
        """Sample the next questions and put back those that were cancelled."""
        plan = self.epoch_plan
        self.push_weights()
        questions = self._stream.take(plan.questions_asked)
        enough = plan.questions_per_epoch if plan.extra_questions else None
        sampled = self.collector.collect(questions, plan.group_size, "rollouts", enough)
        groups, ended = deal_groups(sampled)
        # What no rank finished; every rank has the same stream.
        self._stream.put_back([q for n, q in enumerate(questions) if n not in ended])
        return groups

    def train_dataloader(self) -> DataLoader[Any]:
        """Collect this epoch's rollouts and return its minibatches.

        Lightning asks twice for the first epoch after a resume; the second time it gets the same.
        """
        if self._buffer is None or self._buffer.was_read:
            start = time.perf_counter()
            groups = self._epoch_groups()
            self.rollout_seconds = time.perf_counter() - start
        else:
            groups = self._buffer.by_position
        epoch, version = 0, None
        if self.trainer is not None:
            module: Any = self.trainer.lightning_module
            epoch, version = self.trainer.current_epoch, module.policy_version
        self._buffer = buffer = RolloutBuffer(
            list(groups.values()), self.plan, epoch, version, list(groups)
        )
        buffer.share()
        if self.trainer is not None:
            self.trainer.accumulate_grad_batches = buffer.micro_batches
        buffer.require_rollouts()
        return DataLoader(buffer, batch_size=None)

    def val_dataloader(self) -> DataLoader[Any]:
        """Return held-out rollouts, sampled afresh each time the loader is read."""
        return self._evaluation_loader("validation")

    def test_dataloader(self) -> DataLoader[Any]:
        """Return test rollouts."""
        return self._evaluation_loader("test")

    def predict_dataloader(self) -> DataLoader[Any]:
        """Return test rollouts."""
        return self._evaluation_loader("test")

    def _evaluation_loader(self, split: Split) -> DataLoader[Any]:
        def sample() -> EvaluationBatch:
            self.push_weights()
            return EvaluationBatch(self.collector.collect(self.asked.questions(split), 1, split))

        return DataLoader(OneBatch(sample), batch_size=None)

    # --- resume -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Save where the question stream stands, and in which data."""
        return self._before_ahead or self._stream.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the question stream; an evaluation and a run with other questions have none.

        Raises:
            ConfigError: if the questions are not those of the checkpoint.
        """
        is_training = self.trainer is None or self.trainer.state.fn == TrainerFn.FITTING
        if is_training and not self.restarts_questions:
            self._stream.load_state_dict(state_dict)


def data_module(trainer: lightning.Trainer) -> RolloutDataModule:
    """Return the data module of a Trainer; the Trainer's own attribute has no type.

    Raises:
        ConfigError: if it was given dataloaders instead.
    """
    found: RolloutDataModule | None = trainer.datamodule  # type: ignore[attr-defined]
    if found is None:
        raise ConfigError(
            "Expected `trainer.fit(module, datamodule=RolloutDataModule(...))`, got no data module."
        )
    return found

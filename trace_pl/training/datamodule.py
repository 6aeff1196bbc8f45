"""The DataModule: questions in, fresh rollouts out, once per epoch. It knows nothing of credit."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import lightning
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader

from trace_pl.engines.protocol import RolloutEngine
from trace_pl.errors import ConfigError
from trace_pl.models.loading import BUILT_IN_BASE, load_end_ids, load_tokenizer, resolve_model
from trace_pl.rollout.agent import AgentLoop, prompt_of
from trace_pl.rollout.chat.answer_formats import AnswerFormat, AnswerTags
from trace_pl.rollout.chat.call_check import check_calls
from trace_pl.rollout.chat.call_formats import HermesFormat, ToolCallFormat
from trace_pl.rollout.chat.template import ChatTemplate
from trace_pl.rollout.chat.template_check import check_template
from trace_pl.rollout.collector import Collector
from trace_pl.rollout.grading import Reward
from trace_pl.rollout.trajectory import AgentLimits
from trace_pl.tasks.asked import AskedQuestions
from trace_pl.tasks.protocol import Split, Task
from trace_pl.tasks.readable import require_readable_answers
from trace_pl.tasks.rewards import ExactMatchReward
from trace_pl.tasks.stream import QuestionStream
from trace_pl.tools.protocol import Toolbox
from trace_pl.training.buffer import BatchPlan, RolloutBuffer
from trace_pl.training.minibatch import EvaluationBatch, OneBatch
from trace_pl.training.trainer_checks import check_trainer
from trace_pl.types import Question, RolloutGroup

EngineFactory = Callable[[str], RolloutEngine]
T = TypeVar("T")


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
            log-probs of a fixed prompt after each weight push.
        seed: Orders the questions.
        max_staleness: 1 collects the rollouts of the next epoch while this one trains: they come
            from the weights before its steps, and the loss weighs them for that. The engine has to
            run in a process of its own. A resumed run collects what was under way anew, from newer
            weights. 0 trains on nothing but the newest policy's rollouts.
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
        parity_tolerance: float = 1e-3,
        seed: int = 0,
        extra_questions: int = 0,
        max_staleness: Literal[0, 1] = 0,
        test_questions: int | None = None,
    ) -> None:
        """Store settings; nothing heavy happens before :meth:`open`.

        Raises:
            ConfigError: if a count or the tolerance is too small.
        """
        super().__init__()
        if group_size < 2:
            raise ConfigError(
                f"Expected data.group_size of at least 2, got {group_size}. The outcome advantage "
                "compares rollouts of one question; the paper uses 8."
            )
        counts: dict[str, tuple[float | None, int]] = {
            "questions_per_epoch": (questions_per_epoch, 1),
            "num_steps": (num_steps, 1),
            "num_passes": (num_passes, 1),
            "tokens_per_forward": (tokens_per_forward, 1),
            "evaluation_questions": (evaluation_questions, 1),
            "test_questions": (test_questions, 1),
            "extra_questions": (extra_questions, 0),
            "parity_tolerance": (parity_tolerance, 0),
        }
        for name, (value, least) in counts.items():
            if value is not None and value < least:
                raise ConfigError(f"Expected data.{name} of at least {least}, got {value}.")
        if extra_questions and max_staleness:
            raise ConfigError(
                "Expected data.extra_questions or data.max_staleness, got both. Leave one at 0: "
                "ranks can not agree on cancelled questions while they train."
            )
        self.task = task
        self.make_engine = engine
        self.model_name = model_name
        self.group_size = group_size
        self.questions_per_epoch = questions_per_epoch
        self.extra_questions = extra_questions
        self.limits = limits or AgentLimits()
        longest = self.limits.max_trajectory_tokens
        self.plan = BatchPlan(num_steps, num_passes, tokens_per_forward, seed, longest)
        self.call_format = call_format or HermesFormat()
        self.answer_format = answer_format or AnswerTags()
        self.reward = reward or ExactMatchReward()
        self.system_prompt = system_prompt
        self.asked = AskedQuestions(
            task,
            at_least=questions_per_epoch + extra_questions,
            at_most={"validation": evaluation_questions, "test": test_questions},
        )
        self.parity_tolerance = parity_tolerance
        self.max_staleness = max_staleness
        self.restarts_questions = False  # set for a run that goes on with another task
        self._stream = QuestionStream([], seed)
        self.buffer: RolloutBuffer | None = None
        self.rollout_seconds = 0.0
        self._before_ahead: dict[str, Any] | None = None
        self._tools: Toolbox | None = None
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
        if is_fit and self.questions_per_epoch < num_ranks:
            raise ConfigError(
                f"Expected data.questions_per_epoch of at least 1 for each of {num_ranks} ranks, "
                f"got {self.questions_per_epoch}."
            )
        splits = self.asked.read(stage, num_ranks)
        if self._tools is None:
            self.template = self._make_template()
            self._warn_of_silent_prompt()
        for question in [question for split in splits for question in split]:
            prompt_of(question, self.template, self.limits, self.system_prompt)
            require_readable_answers(question, self.answer_format, self.call_format)
        if is_fit:
            self._stream.questions = self.asked.questions("train")
        if starts_engine and self._collector is None:
            self._start_engine()

    def _warn_of_silent_prompt(self) -> None:
        opening = self.answer_format.opening.strip()
        told = f"{self.system_prompt}\n{self.answer_format.instruction}"
        if self.model_name != BUILT_IN_BASE and opening not in told:
            rank_zero_warn(
                f"The prompt does not say that an answer begins with {opening!r}: a model that was "
                "not taught so earns no reward. Leave data.answer_format.init_args.instruction "
                "at null, or say it there or in data.system_prompt."
            )

    def _start_engine(self) -> None:
        engine = self.make_engine(resolve_model(self.model_name))
        if self.max_staleness and not engine.runs_apart:
            engine.close()
            raise ConfigError(
                "Expected an engine in a process of its own for data.max_staleness of 1, got "
                f"{type(engine).__name__}. Set data.engine to "
                "trace_pl.engines.ServerEngine, or data.max_staleness to 0."
            )
        loop = AgentLoop(
            engine,
            # Tokenizers are not made for two threads at once.
            self._make_template() if self.max_staleness else self.template,
            self._toolbox(),
            self.call_format,
            self.reward,
            self.limits,
            system_prompt=self.system_prompt,
        )
        self._collector = Collector(loop, self.parity_tolerance)

    def _toolbox(self) -> Toolbox:
        if self._tools is None:
            self._tools = self.task.toolbox()
        return self._tools

    def _make_template(self) -> ChatTemplate:
        schemas = self._toolbox().schemas()
        template = ChatTemplate(
            load_tokenizer(self.model_name),
            schemas,
            self.call_format.describe(schemas),
            load_end_ids(self.model_name),
            self.answer_format,
        )
        check_template(template)
        check_calls(template, self.call_format)
        return template

    def setup(self, stage: str) -> None:
        """Open the data and check it against the Trainer."""
        if self.trainer is not None:
            name = "accumulate_grad_batches"
            check_trainer({name: getattr(self.trainer, name)}, stage)
        self.open(stage, self.trainer.world_size if self.trainer else 1)

    @property
    def collector(self) -> Collector:
        """What samples rollouts, made by :meth:`open`."""
        assert self._collector is not None, "open() makes the collector"
        return self._collector

    @property
    def parity(self) -> float:
        """Largest difference of engine and trainer after the last weight push, in nats."""
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

    # --- rollouts ---------------------------------------------------------------------------

    def collect(
        self, questions: Sequence[Question], group_size: int, what: str, enough: int | None = None
    ) -> dict[int, RolloutGroup]:
        """Sample rollouts from the current policy; see :meth:`Collector.collect`."""
        self.pull_weights()
        return self.collector.collect(questions, group_size, what, enough)

    def pull_weights(self) -> None:
        """Copy the policy into the engine.

        The data module pulls because on resume ``train_dataloader`` runs before any training hook.
        """
        assert self.trainer is not None, "weights are pulled from a Trainer's module"
        self.collector.pull_weights(self.trainer.lightning_module)

    def _collect_epoch(self) -> list[RolloutGroup]:
        """Return the rollouts of this epoch, and begin those of the next if that is wanted."""
        groups = self.collector.finish() if self.collector.is_ahead else self._collect_now()
        self._before_ahead = None
        if self.max_staleness and not self._is_last_epoch():
            self.pull_weights()
            self._before_ahead = self._stream.state_dict()
            questions = self._stream.take(self.questions_per_epoch)
            self.collector.start(self._of_this_rank(questions), self.group_size)
        return list(groups.values())

    def _is_last_epoch(self) -> bool:
        assert self.trainer is not None, "epochs are a Trainer's"
        return self.trainer.current_epoch + 1 == self.trainer.max_epochs

    def _collect_now(self) -> dict[int, RolloutGroup]:
        """Sample the next questions and put back those that were cancelled."""
        questions = self._stream.take(self.questions_per_epoch + self.extra_questions)
        enough = None
        if self.extra_questions:
            enough = len(self._of_this_rank(questions[: self.questions_per_epoch]))
        mine = self._of_this_rank(questions)
        groups = self.collect(mine, self.group_size, "rollouts", enough)
        if self.extra_questions:
            has_ended = torch.tensor([position in groups for position in range(len(mine))])
            self._put_back(questions, has_ended)
        return groups

    def _put_back(self, questions: Sequence[Question], has_ended: Tensor) -> None:
        """Return what no rank finished to the stream, which is the same on every rank."""
        ended = torch.zeros(len(questions))
        ended[self._of_this_rank(range(len(questions)))] = has_ended.float()
        if self.trainer is not None and self.trainer.world_size > 1:
            ended = self._reduce(ended, "sum")
        self._stream.put_back([q for q, n in zip(questions, ended.tolist(), strict=True) if n == 0])

    def train_dataloader(self) -> DataLoader[Any]:
        """Collect this epoch's rollouts and return its minibatches.

        Lightning asks twice for the first epoch after a resume; the second time it gets the same.
        """
        if self.buffer is None or self.buffer.was_read:
            start = time.perf_counter()
            groups: Sequence[RolloutGroup] = self._collect_epoch()
            self.rollout_seconds = time.perf_counter() - start
        else:
            groups = self.buffer.groups
        epoch, version = 0, None
        if self.trainer is not None:
            module: Any = self.trainer.lightning_module
            epoch, version = self.trainer.current_epoch, module.policy_version
        self.buffer = RolloutBuffer(groups, self.plan, epoch, version)
        if self.trainer is not None:
            self._agree_among_ranks(self.buffer)
            self.trainer.accumulate_grad_batches = self.buffer.micro_batches
        self.buffer.require_rollouts()
        return DataLoader(self.buffer, batch_size=None)

    def _agree_among_ranks(self, buffer: RolloutBuffer) -> None:
        if self.trainer is not None and self.trainer.world_size > 1:
            buffer.share(self._reduce, self.trainer.world_size)

    def _reduce(self, tensor: Tensor, how: str) -> Tensor:
        assert self.trainer is not None, "ranks are a Trainer's"
        strategy = self.trainer.strategy
        reduced: Tensor = strategy.reduce(tensor.to(strategy.root_device), reduce_op=how)
        return reduced.cpu()

    def _of_this_rank(self, items: Sequence[T]) -> Sequence[T]:
        """Return every n-th of what all ranks share, n being their number."""
        if self.trainer is None:
            return items
        return items[self.trainer.global_rank :: self.trainer.world_size]

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
        mine = self._of_this_rank(self.asked.questions(split))
        rollouts = OneBatch(lambda: EvaluationBatch(self.collect(mine, 1, split).values()))
        return DataLoader(rollouts, batch_size=None)

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

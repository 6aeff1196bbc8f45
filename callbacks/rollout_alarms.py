"""Alarms about rollouts: answers, tools, limits and rewards."""

from __future__ import annotations

from dataclasses import dataclass

from callbacks.alarm import BROKEN, Alarm, Epoch, History, lately, recent

EXPECTED = "data/rollouts"
"""Under this name an epoch holds how many rollouts the settings ask for."""

_ENDS = {
    "length": "Most responses are cut. Raise data.limits.max_response_tokens.",
    "max_tokens": "Most trajectories are cut. Raise data.limits.max_trajectory_tokens.",
    "max_turns": "Most rollouts use all their turns. Raise data.limits.max_turns, or say in "
    "data.system_prompt when to answer.",
    "tool_failure": "Most rollouts end after too many tool errors in a row. See "
    "rollout/tool_errors/* and data.call_format.",
}
_STOPS = tuple(f"rollout/stop/{reason}" for reason in _ENDS)

_TOOL_ERRORS = {
    "parse": "Most are calls that cannot be read. Set data.call_format to how the model writes "
    "them (the text rollout/0 shows it), or lower data.engine.init_args.temperature.",
    "unknown_tool": "Most name a tool that does not exist. Name the tools in data.system_prompt.",
    "arguments": "Most have arguments that do not fit the tool. Show an example of a call in "
    "data.system_prompt.",
    "timeout": "Most calls run out of time. Give the tools of data.task more time or capacity.",
    "tool": "Most calls fail inside the tool. Check the tools of data.task; the text rollout/0 "
    "shows what they say.",
}


@dataclass(frozen=True)
class NoAnswers(Alarm):
    """Hardly any rollout gives an answer, so there is nothing to reward.

    Args:
        share: Largest share of rollouts with an answer at which the alarm goes off.
    """

    name = "no_answers"
    tags = ("rollout/answer_rate", "rollout/count", *_STOPS)
    share: float = 0.02

    def message(self, history: History) -> str | None:
        """Distinguish limits that cut the answer off from a form of answer that is not read."""
        rates = recent(history, "rollout/answer_rate", self.epochs)
        counts = recent(history, "rollout/count", self.epochs)
        if not rates or not counts or max(rates) > self.share:
            return None
        answers = sum(rate * count for rate, count in zip(rates, counts, strict=True))
        cause = _usual_end(history[-1]) or (
            "Likely the final messages (see the text rollout/0) hold answers in another form than "
            "the one that is read. Set data.answer_format to it, or ask for it in "
            "data.system_prompt."
        )
        if history[0].get("rollout/answer_rate", 0.0) > 0.2:
            cause = BROKEN
        return (
            f"{answers:.0f} of {sum(counts):.0f} rollouts gave an answer in "
            f"{lately(self.epochs)}, so there is nothing to reward. {cause}"
        )


@dataclass(frozen=True)
class LostRollouts(Alarm):
    """Many rollouts are left out because the engine or a tool failed.

    Args:
        share: Share of lost rollouts above which the alarm goes off.
    """

    name = "lost_rollouts"
    tags = ("rollout/count",)
    share: float = 0.25

    def message(self, history: History) -> str | None:
        """Compare what counts with what was asked for."""
        counts = recent(history, "rollout/count", self.epochs)
        expected = recent(history, EXPECTED, self.epochs)
        if not counts or not expected:
            return None
        lost = [1.0 - count / asked for count, asked in zip(counts, expected, strict=True)]
        if min(lost) <= self.share:
            return None
        return (
            f"{lost[-1]:.0%} of {expected[-1]:.0f} rollouts were lost, and more than "
            f"{self.share:.0%} in {lately(self.epochs)}. The engine or the tools fail or are too "
            "slow: see their errors above. Mend the tools of data.task, or raise "
            "data.limits.tool_timeout_s, data.limits.tool_retries or data.limits.max_seconds."
        )


@dataclass(frozen=True)
class NoToolCalls(Alarm):
    """No rollout calls a tool."""

    name = "no_tool_calls"
    tags = ("rollout/tool_turns", "rollout/stop/length")

    def message(self, history: History) -> str | None:
        """Distinguish responses cut before their first call from calls that are not seen."""
        turns = recent(history, "rollout/tool_turns", self.epochs)
        if not turns or max(turns) > 0.0:
            return None
        cause = (
            "Likely the model writes calls in another form than data.call_format reads, or its "
            "chat template does not show it the tools. Set data.call_format, or describe the "
            "tools in data.system_prompt."
        )
        if history[-1].get("rollout/stop/length", 0.0) > 0.5:
            cause = "Most responses are cut before a call. Raise data.limits.max_response_tokens."
        if history[0].get("rollout/tool_turns", 0.0) > 0.2:
            cause = BROKEN
        return f"None of the rollouts called a tool in {lately(self.epochs)}. {cause}"


@dataclass(frozen=True)
class FlatGroups(Alarm):
    """In every group all rewards are equal, so the outcome teaches nothing."""

    name = "flat_groups"
    tags = ("rollout/zero_variance_groups", "rollout/success", "rollout/answer_rate", *_STOPS)

    def message(self, history: History) -> str | None:
        """Distinguish questions that are too easy from those that are too hard."""
        flat = recent(history, "rollout/zero_variance_groups", self.epochs)
        if not flat or min(flat) < 1.0:
            return None
        success = history[-1].get("rollout/success", 0.0)
        if history[-1].get("rollout/answer_rate", 1.0) < 0.05:
            cause = "Hardly any rollout gives an answer: mend that first."
        elif success > 0.5:
            cause = "The questions are too easy. Give harder ones (data.task)."
        else:
            cause = _usual_end(history[-1]) or (
                "Likely the questions are too hard, or data.reward accepts no answer of the "
                "policy: compare answers and gold answers in the text rollout/0. Give easier "
                "questions (data.task), or raise data.group_size."
            )
        return (
            f"In every group all rollouts had the same reward for {self.epochs} epochs "
            f"(success {success:.2f}), so the outcome teaches nothing. {cause}"
        )


@dataclass(frozen=True)
class ToolErrors(Alarm):
    """Most tool calls fail.

    Args:
        share: Share of failed calls above which the alarm goes off.
    """

    name = "tool_errors"
    tags = (
        "rollout/tool_turns",
        "rollout/tool_errors",
        *(f"rollout/tool_errors/{kind}" for kind in _TOOL_ERRORS),
    )
    share: float = 0.5

    def message(self, history: History) -> str | None:
        """Name the kind of error that is most frequent."""
        errors = recent(history, "rollout/tool_errors", self.epochs)
        turns = recent(history, "rollout/tool_turns", self.epochs)
        if not errors or not turns or min(turns) <= 0.0 or min(errors) <= self.share:
            return None
        last = history[-1]
        kind = max(_TOOL_ERRORS, key=lambda kind: last.get(f"rollout/tool_errors/{kind}", 0.0))
        was_well = history[0].get("rollout/tool_errors", 1.0) < 0.5 * self.share
        is_own_fault = kind in ("parse", "unknown_tool", "arguments")
        return (
            f"{errors[-1]:.0%} of the tool calls failed, and more than {self.share:.0%} in "
            f"{lately(self.epochs)}. {BROKEN if was_well and is_own_fault else _TOOL_ERRORS[kind]}"
        )


@dataclass(frozen=True)
class CutResponses(Alarm):
    """Most rollouts end at a token limit.

    Args:
        share: Share of cut rollouts above which the alarm goes off.
    """

    name = "cut_responses"
    tags = ("rollout/stop/length", "rollout/stop/max_tokens")
    share: float = 0.5

    def message(self, history: History) -> str | None:
        """Name the limit."""
        for reason, what in (("length", "response"), ("max_tokens", "trajectory")):
            tag = f"rollout/stop/{reason}"
            cut = recent(history, tag, self.epochs)
            if not cut or min(cut) <= self.share:
                continue
            cause = (
                "Likely it is too small for this model, or responses run on without an end. Raise "
                "it, and look at the ends in the text rollout/0."
            )
            if history[0].get(tag, 1.0) < 0.5 * self.share:
                cause = BROKEN
            return (
                f"{cut[-1]:.0%} of the rollouts were cut by data.limits.max_{what}_tokens, and "
                f"more than {self.share:.0%} in {lately(self.epochs)}. {cause}"
            )
        return None


def _usual_end(epoch: Epoch) -> str:
    """Return how most rollouts end where that is no answer, and what to change; else nothing."""
    found = (cause for end, cause in _ENDS.items() if epoch.get(f"rollout/stop/{end}", 0.0) > 0.5)
    return next(found, "")

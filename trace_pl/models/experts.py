"""Mixtures of experts: how evenly routers send tokens, and sending them where the sampler did."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torchmetrics import Metric
from transformers import PreTrainedModel
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from trace_pl.errors import ConfigError
from trace_pl.models.logprobs import read_mask


@dataclass(frozen=True)
class Experts:
    """What training does about the routers of a mixture.

    Args:
        balance_weight: Weight of the load-balancing loss (Switch Transformer, arXiv 2101.03961,
            eq. 4 to 6); 0 only logs it, which is usual in reinforcement learning.
        replay: Sends each token to the experts that the sampler chose, where the engine recorded
            them; the router's probabilities of these experts are still learned. A token near the
            border between two experts is then the same function on both sides.

    Raises:
        ConfigError: if the weight is negative.
    """

    balance_weight: float = 0.0
    replay: bool = False

    def __post_init__(self) -> None:
        if not self.balance_weight >= 0.0:
            raise ConfigError(
                f"Expected model.experts.balance_weight of at least 0, got {self.balance_weight}."
            )

    def choices(self, experts_BTNK: Tensor | None, mask_BT: Tensor) -> Tensor | None:
        """Return the sampler's (L, N, K) experts for the L tokens that a forward reads.

        None where the routers decide.

        Args:
            experts_BTNK: What the engine recorded, None if nothing.
            mask_BT: The tokens whose log-probs are taken, see ``logprobs.read_mask``.

        Raises:
            ConfigError: if they are wanted and were not recorded.
        """
        if not self.replay or not bool(mask_BT.any()):
            return None
        if experts_BTNK is None:
            raise ConfigError(
                "Expected the sampler's experts for model.experts.replay, got rollouts without. "
                "Set data.engine.init_args.record_experts to true."
            )
        return experts_BTNK[read_mask(mask_BT)]


class ExpertLoad(Metric):
    """How evenly the routers use their experts, as means over layers.

    ``max_load`` is the busiest expert's tokens over the mean, ``unused`` the share of experts
    without any.

    Args:
        num_layers: Layers that have a router (N).
        num_experts: Experts of each (E).
    """

    full_state_update = False
    counts_NE: Tensor

    def __init__(self, num_layers: int, num_experts: int) -> None:
        super().__init__(sync_on_compute=False)  # all metrics are exchanged in one vector
        zeros = torch.zeros(num_layers, num_experts, dtype=torch.float64)
        self.add_state("counts_NE", zeros, dist_reduce_fx="sum")

    def update(self, experts_NLK: Tensor) -> None:
        """Count the K experts of each of L tokens in all N layers."""
        num_layers, num_experts = self.counts_NE.shape
        first_N = num_experts * torch.arange(num_layers, device=experts_NLK.device)
        numbers = (first_N[:, None, None] + experts_NLK).flatten()
        # Moved at once: each copy from an accelerator waits for all that it has to do.
        found = torch.bincount(numbers, minlength=self.counts_NE.numel()).cpu()
        self.counts_NE += found.view_as(self.counts_NE)

    def compute(self) -> dict[str, Tensor]:
        """Return both figures; NaN before any token."""
        load = self.counts_NE / self.counts_NE.mean(dim=1, keepdim=True)
        is_unused = (load == 0.0).double().where(load.isfinite(), torch.nan)
        return {"max_load": load.amax(dim=1).mean(), "unused": is_unused.mean()}


class RouterWatch:
    """Looks at the routers of a model in each training forward.

    Args:
        model: A mixture of the Qwen3-MoE kind.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.routers = routers(model)
        first: Any = self.routers[0]
        self.load = ExpertLoad(len(self.routers), first.num_experts)
        for number, router in enumerate(self.routers):
            router.register_forward_hook(partial(self._after, number))
        self._choices: Tensor | None = None
        self._seen: dict[int, tuple[Tensor, Tensor]] | None = None
        """Logits and experts by layer, while a forward is watched."""

    def begin(self, choices_LNK: Tensor | None = None) -> None:
        """Watch the next forward.

        Args:
            choices_LNK: Experts to use for each of the L tokens it reads in each of N layers, -1
                where the router decides; they hold until the next call, for layers that are
                computed again in the backward pass.
        """
        self._choices = choices_LNK
        self._seen = {}

    def finish(self) -> Tensor:
        """Return the load-balancing loss of that forward, and count its tokens."""
        seen, self._seen = self._seen, None
        assert seen, "begin() and a forward come first"
        logits, experts = zip(*seen.values(), strict=True)
        self.load.update(torch.stack(experts))
        first: Any = self.routers[0]
        gates: Any = logits  # annotated as a tuple of one
        loss = load_balancing_loss_func(gates, first.num_experts, first.top_k)
        assert isinstance(loss, Tensor)
        return loss

    def _after(
        self, number: int, router: nn.Module, inputs: object, outputs: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        logits_LE, scores_LK, experts_LK = outputs
        if self._choices is not None:
            scores_LK, experts_LK = _follow(router, self._choices[:, number], *outputs)
        if self._seen is not None:
            # A layer that is computed again in the backward pass counts once.
            self._seen.setdefault(number, (logits_LE, experts_LK))
        return None if self._choices is None else (logits_LE, scores_LK, experts_LK)


class ChoiceRecorder:
    """Notes the experts of every forward of a batch that grows by a few tokens each time.

    Args:
        model: The model; without routers nothing is noted.
        batch_size: Rows of each forward (B).
    """

    def __init__(self, model: PreTrainedModel, batch_size: int) -> None:
        self._routers = routers(model)
        self._batch_size = batch_size
        self._seen: list[list[Tensor]] = [[] for _ in self._routers]
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> Self:
        for seen, router in zip(self._seen, self._routers, strict=True):
            self._hooks.append(router.register_forward_hook(partial(self._note, seen)))
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def choices(self) -> Tensor | None:
        """Return (B, T, N layers, K) int16 of all tokens read so far; None without routers."""
        if not self._routers:
            return None
        return torch.stack([torch.cat(seen, dim=1) for seen in self._seen], dim=2)

    def _note(
        self, seen: list[Tensor], router: nn.Module, inputs: object, outputs: tuple[Tensor, ...]
    ) -> None:
        experts = outputs[2].to("cpu", torch.int16)
        seen.append(experts.view(self._batch_size, -1, experts.shape[-1]))


def routers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the router of each layer that has one, in order."""
    gates = (getattr(layer.mlp, "gate", None) for layer in model.get_decoder().layers)
    return [gate for gate in gates if isinstance(gate, nn.Module) and hasattr(gate, "top_k")]


def _follow(
    router: Any,  # noqa: ANN401  (transformers' routers share no type)
    choices_LK: Tensor,
    logits_LE: Tensor,
    scores_LK: Tensor,
    experts_LK: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return scores and experts with the given choices put in where they are known."""
    is_known_L1 = choices_LK[:, :1] >= 0
    chosen_LK = torch.where(is_known_L1, choices_LK.long(), experts_LK)
    probabilities = logits_LE.float().softmax(-1).gather(1, chosen_LK)
    if router.norm_topk_prob:
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    return torch.where(is_known_L1, probabilities.to(scores_LK.dtype), scores_LK), chosen_LK

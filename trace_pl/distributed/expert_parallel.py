"""Experts of a mixture dealt to ranks: tokens travel to experts instead of weights to tokens."""

from __future__ import annotations

import logging

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.distributed.tensor_parallel import apply_expert_parallelism

from trace_pl.errors import ConfigError

_DISPATCH = "ep_dispatch_experts"  # transformers' name of the style


def deal_experts(model: PreTrainedModel, mesh: DeviceMesh) -> list[nn.Module]:
    """Keep on each rank its part of every layer's experts; forwards become collective.

    Args:
        model: On any device, ``meta`` included.
        mesh: One dimension, the ranks that hold all experts together.

    Returns:
        The modules that hold experts; each exchanges tokens with the other ranks when it runs.

    Raises:
        ConfigError: if transformers has no plan for the model, or its experts cannot be divided.
    """
    plan = model.ep_plan
    if _DISPATCH not in plan.values():
        raise ConfigError(
            "Expected a mixture of experts that transformers can spread over ranks for "
            f"trainer.strategy.expert_parallel_size {mesh.size()}, got a "
            f"{type(model).__name__}. Set it to 1."
        )
    num_experts = model.config.get_text_config().num_experts
    if num_experts % mesh.size():
        raise ConfigError(
            "Expected trainer.strategy.expert_parallel_size to divide the model's "
            f"{num_experts} experts, got {mesh.size()}."
        )
    # Torch warns that an expert's weights and norms take two collectives to gather, one for each
    # dimension of their mesh. They do; it is the layout.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    # The second mesh, of ranks that read the same tokens, is none here.
    apply_expert_parallelism(model, mesh, None, plan)  # type: ignore[arg-type]
    return [module for module in model.modules() if getattr(module, "_is_expert_parallel", False)]

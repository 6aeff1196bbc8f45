"""Engines that sample responses: one protocol, in this process or in servers."""

from trace_pl.engines.auto import AutoEngine
from trace_pl.engines.protocol import (
    Completion,
    EngineNeeds,
    GenerationRequest,
    RolloutEngine,
    SamplingSettings,
)
from trace_pl.engines.server.engine import ServerEngine
from trace_pl.engines.transformers import HFEngine
from trace_pl.engines.vllm.engine import VLLMEngine

__all__ = [
    "AutoEngine",
    "Completion",
    "EngineNeeds",
    "GenerationRequest",
    "HFEngine",
    "RolloutEngine",
    "SamplingSettings",
    "ServerEngine",
    "VLLMEngine",
]

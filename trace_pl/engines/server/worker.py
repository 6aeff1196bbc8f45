"""What trace_pl adds to the workers of a vLLM server; vLLM imports it by name.

It takes weights through vLLM's interface for transfer engines. The two functions around a reload
are vLLM's own, and those that its engines call: no public one loads a layer as soon as it is whole.
"""

from __future__ import annotations

import ctypes
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from trace_pl.engines.server.main import BACKEND
from trace_pl.engines.vllm.internals import forget_packed_experts, pack_tied_head

_PR_SET_PDEATHSIG = 1


@dataclass
class FolderInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Where the trainer will put files."""

    folder: str


@dataclass
class FileInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """One file of weights."""

    path: str


class FileReceiver(WeightTransferEngine):  # type: ignore[misc]
    """Loads weights from safetensors files in a folder that trainer and server both see."""

    init_info_cls = FolderInfo
    update_info_cls = FileInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: FolderInfo) -> None:
        """Check that the folder is shared and that log-probs will be those that are drawn from.

        Raises:
            ValueError: if not.
        """
        if not Path(init_info.folder).is_dir():
            raise ValueError(f"Expected the trainer's folder '{init_info.folder}', got none here.")
        mode = self.model_config.logprobs_mode
        if mode != "processed_logprobs":
            raise ValueError(f"Expected --logprobs-mode=processed_logprobs, got {mode}.")

    def start_weight_update(self) -> None:
        """Prepare every layer for new weights."""
        if self.device.type == "cpu":
            forget_packed_experts(self.model)
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: FileInfo) -> None:
        """Load one file.

        It is not mapped into memory: a layer may wait for its last weight after the file is gone.
        """
        try:
            tensors = safetensors.torch.load(Path(update_info.path).read_bytes())
            self.model.load_weights(tensors.items())
        except BaseException:
            self.finish_weight_update()  # layers left open could not take the next update
            raise

    def finish_weight_update(self) -> None:
        """Finish every layer."""
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            pack_tied_head(self.model)

    def shutdown(self) -> None:
        """Do nothing: no connection is held."""


class WorkerExtension:
    """Adds nothing to a worker: naming it makes vLLM's workers import this file."""


WeightTransferEngineFactory.register_engine(BACKEND, FileReceiver)
if sys.platform == "linux":
    # A worker whose parent is killed would keep the device's memory forever.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

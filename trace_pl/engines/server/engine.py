"""vLLM in a process of its own, or on other machines."""

from __future__ import annotations

import atexit
import math
import shutil
import uuid
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from trace_pl.distributed.leader import from_leader, has_other_ranks, is_leader, num_ranks
from trace_pl.engines.protocol import (
    Completion,
    EngineNeeds,
    GenerationRequest,
    RolloutEngine,
    SamplingSettings,
)
from trace_pl.engines.server.child import ChildServer
from trace_pl.engines.server.client import ServerClient
from trace_pl.engines.server.group import ServerGroup, read_completion
from trace_pl.engines.server.pending import PendingRequests
from trace_pl.engines.server.weight_files import WeightFiles
from trace_pl.engines.vllm.setup import require_memory, sampling_parameters
from trace_pl.errors import RolloutError, ServerError
from trace_pl.models.names import resolve_model

_GIB = 2**30
_STEP_S = 0.05  # how long a step waits if nothing has finished


class ServerEngine(RolloutEngine):
    """Samples through vLLM's own HTTP server.

    By default the server is a child of this process and ends with it. With ``urls`` requests are
    spread over servers that run already, each started on its machine with
    ``python -m trace_pl.engines.server.main MODEL --max-model-len N --host ADDRESS --port 8000``;
    a push of weights goes to all of them. Several ranks of a trainer may share the servers.

    A child that dies is started once more, gets the same weights and the unfinished requests again;
    their streams are seeded, so the same tokens come.

    Args:
        model: folder of a Hugging Face model, or a hub id ``owner/name``.
        max_model_len: most tokens of one sequence.
        max_num_seqs: sequences that each server generates at the same time.
        kv_cache_gib: memory for keys and values in GiB; None gives vLLM the share
            ``gpu_memory_utilization`` of the device.
        gpu_memory_utilization: share of the device's memory, used only if ``kv_cache_gib`` is None.
        temperature: temperature of sampling. Log-probs are those of the distribution sampled from.
        top_p: probability mass of the nucleus that is sampled from.
        dtype: number format of the server, and of weights on their way; float32 matches a float32
            trainer exactly.
        seed: seed of sampling; None takes torch's initial seed, which ``seed_everything`` sets.
        num_threads: CPU threads of the child; None takes as many as torch has.
        urls: addresses of running servers, which then have settings of their own for model, memory,
            threads, and were started with this ``dtype``.
        transfer: how weights get there; None means through this machine's memory.
        timeout_s: longest time in which a server answers nothing at all, neither a response nor a
            file of weights; then it hangs.
        start_timeout_s: longest start of the child.

    Raises:
        ConfigError: if the child does not start, or a server reads shorter sequences.
        ServerError: if a server cannot be reached.
    """

    runs_apart = True

    def __init__(
        self,
        model: str,
        max_model_len: int = 4096,
        max_num_seqs: int = 128,
        kv_cache_gib: float | None = 1.0,
        gpu_memory_utilization: float = 0.5,
        temperature: float = 1.0,
        top_p: float = 1.0,
        dtype: Literal["float32", "bfloat16", "auto"] = "float32",
        seed: int | None = None,
        num_threads: int | None = None,
        urls: list[str] | None = None,
        transfer: WeightFiles | None = None,
        timeout_s: float = 600.0,
        start_timeout_s: float = 600.0,
    ) -> None:
        self.max_model_len = max_model_len
        self.settings = SamplingSettings(
            temperature, top_p, torch.initial_seed() if seed is None else seed
        )
        self.version = -1
        # vLLM's "auto" is bfloat16 or float16, whatever the model's files hold.
        self.dtype = torch.bfloat16 if dtype == "auto" else getattr(torch, dtype)
        self.weight_dtype = None if dtype == "auto" else getattr(torch, dtype)
        arguments = [
            resolve_model(model),
            f"--max-model-len={max_model_len}",
            f"--max-num-seqs={max_num_seqs}",
            f"--gpu-memory-utilization={gpu_memory_utilization}",
            f"--dtype={dtype}",
            "--no-use-tqdm-on-load",
        ]
        if kv_cache_gib is not None:
            arguments.append(f"--kv-cache-memory-bytes={math.ceil(kv_cache_gib * _GIB)}")
            if not urls and not torch.cuda.is_available():
                require_memory(kv_cache_gib)
        self._max_calls = max_num_seqs
        # Ranks share servers that run already, and have a child each.
        shared = max_num_seqs * len(urls) // num_ranks() if urls else max_num_seqs
        self.max_num_seqs = max(1, shared)
        self._timeout_s = timeout_s
        self._transfer = transfer or WeightFiles()
        self._folder = self._transfer.make_folder()
        self._run_id = uuid.uuid4().hex[:8]
        self._weights: Iterable[tuple[str, Tensor]] | None = None
        self._label: str | None = None
        self._pending = PendingRequests()
        self._child: ChildServer | None = None
        self._remote: ServerGroup | None = None
        atexit.register(self.close)  # a run that fails leaves no file in a shared folder
        try:
            if urls:
                self._remote = self._connected([self._client(url) for url in urls])
            else:
                self._child = ChildServer(
                    arguments,
                    num_threads or torch.get_num_threads(),
                    self._folder,
                    make_client=lambda socket: self._client("http://vllm", socket),
                    make_group=lambda client: self._group([client]),
                    start_timeout_s=start_timeout_s,
                )
                self._child.group.connect(max_model_len)
        except BaseException:
            self.close()
            raise

    @classmethod
    def needs(cls, settings: Mapping[str, Any]) -> EngineNeeds:
        """Return what servers take; a child computes on the GPU of its trainer."""
        urls = settings.get("urls") or []
        return replace(
            super().needs(settings),
            has_own_gpus=bool(urls),
            num_servers=max(1, len(urls)),
            pushes_files=True,
        )

    # --- sampling ---------------------------------------------------------------------------

    def submit(self, request: GenerationRequest) -> None:
        """Send a request."""
        parameters = {**sampling_parameters(self.settings, request), "detokenize": False}
        answer = self._servers.generate(
            request.stream, request.prompt_ids, parameters, request.priority
        )
        self._pending.add(request, answer)

    def step(self) -> list[Completion]:
        """Return the requests that have finished; wait a moment if none has.

        Raises:
            RolloutError: if a server fails; of a child, if it fails a second time.
        """
        completions = []
        try:
            for request, answer in self._pending.arrived(_STEP_S):
                completions.append(
                    read_completion(request.request_id, answer.result(), self._label)
                )
                self._pending.remove(answer)
        except ServerError as error:
            self._recover(error)
        except RolloutError:
            self._pending.drop()
            raise
        return completions

    def has_unfinished(self) -> bool:
        """Return whether :meth:`step` has work to do."""
        return bool(self._pending)

    def cancel(self, request_ids: Collection[str]) -> None:
        """Forget requests."""
        self._pending.cancel(request_ids)

    # --- weights ----------------------------------------------------------------------------

    def push_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy new weights into every server; see ``RolloutEngine.push_weights``.

        Raises:
            RolloutError: if requests are unfinished, or a server fails or refuses the weights.
        """
        self.require_idle()
        if self._child is None and has_other_ranks():
            self._push_together(named_tensors, version)
        else:
            self._push_alone(named_tensors, version)
        self.version = version

    def _push_alone(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Push to servers that no other rank uses."""
        if self._child is not None:
            self._child.forgive()
            if self._child.process.has_exited():
                self._weights = None  # the old ones, which nobody needs
                self._recover(ServerError("The vLLM server exited while it was idle."))
        self._weights = named_tensors
        self._label = f"{self._run_id}/{version}"
        try:
            self._servers.push(named_tensors, self._label)
        except ServerError as error:
            self._recover(error)

    def _push_together(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Let one rank push to the servers that all share; the others help to gather."""
        # All ranks have come here, so none has a request that the push would abort.
        self._label = from_leader(f"{self._run_id}/{version}")
        failure = ""
        remaining = iter(named_tensors)
        if is_leader():
            try:
                self._servers.push(remaining, str(self._label))
            except RolloutError as error:
                failure = str(error)
        deque(remaining, maxlen=0)  # gathering takes all ranks, also after a failure
        failure = from_leader(failure)
        if failure:
            raise ServerError(failure)

    def prompt_logprobs(self, token_ids: Sequence[int]) -> Tensor:
        """Return the log-prob of each token given those before it, at temperature 1.

        Args:
            token_ids: T ids, at least 2 and fewer than ``max_model_len``.

        Returns:
            (T - 1,) float32 in nats; where servers differ, that which is farthest from the first
            server's, so that whoever checks the result checks every server.
        """
        assert not self.has_unfinished(), "scoring runs alone"
        try:
            found_ST = self._servers.prompt_logprobs(token_ids)
        except ServerError as error:
            self._recover(error)
            found_ST = self._servers.prompt_logprobs(token_ids)
        farthest_T = (found_ST - found_ST[0]).abs().argmax(dim=0)
        return found_ST.gather(0, farthest_T[None])[0]

    def close(self) -> None:
        """Stop the child and remove what was left of the weights."""
        atexit.unregister(self.close)
        self._pending.drop()
        for servers in (self._child, self._remote):
            if servers is not None:
                servers.close()
        self._child = self._remote = None
        shutil.rmtree(self._folder, ignore_errors=True)

    # --- servers ----------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """Process id of the child, which is that of its process group."""
        assert self._child is not None, "the servers run on other machines"
        return self._child.process.pid

    @property
    def _servers(self) -> ServerGroup:
        servers = self._remote if self._child is None else self._child.group
        assert servers is not None, "the engine was closed"
        return servers

    def _recover(self, error: ServerError) -> None:
        """Bring a child that died back to where it was: weights, then unfinished requests.

        Raises:
            ServerError: what else is wrong, or that this is its second death.
        """
        lost = self._pending.drop()
        if self._child is None:
            raise error
        is_read_once = self._weights is not None and iter(self._weights) is self._weights
        obstacle = " and its weights can be read only once" if is_read_once else ""
        self._child.restart(error, obstacle)
        self._child.group.connect(self.max_model_len)
        if self._weights is not None and self._label is not None:
            try:
                self._servers.push(self._weights, self._label)
            except ServerError as again:
                self._child.restart(again)  # raises: it is the second death
        for request in lost:
            self.submit(request)

    def _client(self, url: str, socket: Path | None = None) -> ServerClient:
        return ServerClient(url, socket, self._max_calls, self._timeout_s)

    def _group(self, clients: list[ServerClient]) -> ServerGroup:
        return ServerGroup(clients, self._transfer, self._folder, self.weight_dtype)

    def _connected(self, clients: list[ServerClient]) -> ServerGroup:
        group = self._group(clients)
        group.connect(self.max_model_len)
        return group

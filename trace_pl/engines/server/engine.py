"""vLLM in a process of its own, or on other machines."""

from __future__ import annotations

import atexit
import logging
import math
import queue
import shutil
import time
import uuid
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Literal

import torch
from torch import Tensor

from trace_pl.distributed.leader import from_leader, has_other_ranks, is_leader
from trace_pl.engines.protocol import (
    Completion,
    GenerationRequest,
    RolloutEngine,
    SamplingSettings,
)
from trace_pl.engines.server.client import Json, ServerClient
from trace_pl.engines.server.group import ServerGroup, read_completion
from trace_pl.engines.server.process import ServerProcess
from trace_pl.engines.server.weight_files import WeightFiles
from trace_pl.engines.vllm.setup import require_memory, sampling_parameters
from trace_pl.errors import ConfigError, RolloutError, ServerError
from trace_pl.models.loading import resolve_model

logger = logging.getLogger(__name__)

_GIB = 2**30
_STEP_S = 0.05  # how long a step waits if nothing has finished
_POLL_S = 0.1
_DEATH_S = 30.0  # vLLM's server looks every 5 s whether its engine has died, and then ends


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
        temperature: of sampling. Log-probs are those of the distribution sampled from.
        top_p: nucleus of sampling.
        dtype: number format of the server, and of weights on their way; float32 matches a float32
            trainer exactly.
        seed: of sampling; None takes torch's initial seed, which ``seed_everything`` sets.
        num_threads: CPU threads of the child; None takes as many as torch has.
        urls: addresses of running servers, which then have settings of their own for model, memory,
            threads, and were started with this ``dtype``.
        transfer: how weights get there; None means through this machine's memory.
        timeout_s: longest time without an answer, for a response or a file of weights.
        start_timeout_s: longest start of the child.

    Raises:
        ConfigError: if the child does not start, or a server reads shorter sequences.
        ServerError: if a server can not be reached.
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
        self._dtype = None if dtype == "auto" else getattr(torch, dtype)
        self._arguments = [
            resolve_model(model),
            f"--max-model-len={max_model_len}",
            f"--max-num-seqs={max_num_seqs}",
            f"--gpu-memory-utilization={gpu_memory_utilization}",
            f"--dtype={dtype}",
            "--no-use-tqdm-on-load",
        ]
        if kv_cache_gib is not None:
            self._arguments.append(f"--kv-cache-memory-bytes={math.ceil(kv_cache_gib * _GIB)}")
            if not urls and not torch.cuda.is_available():
                require_memory(kv_cache_gib)
        self._num_threads = num_threads or torch.get_num_threads()
        self._max_num_seqs = max_num_seqs
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._transfer = transfer or WeightFiles()
        self._folder = self._transfer.make_folder()
        self._run_id = uuid.uuid4().hex[:8]
        self._weights: Iterable[tuple[str, Tensor]] | None = None
        self._label: str | None = None
        self._running: dict[Future[Json], GenerationRequest] = {}
        self._answered: queue.SimpleQueue[Future[Json]] = queue.SimpleQueue()
        self._process: ServerProcess | None = None
        self._can_restart = True
        self._servers = self._group([])
        atexit.register(self.close)  # a run that fails leaves no file in a shared folder
        try:
            if urls:
                clients = [ServerClient(url, None, max_num_seqs, timeout_s) for url in urls]
                self._servers = self._group(clients)
                self._servers.connect(max_model_len)
            else:
                self._start()
        except BaseException:
            self.close()
            raise

    # --- sampling ---------------------------------------------------------------------------

    def submit(self, request: GenerationRequest) -> None:
        """Send a request."""
        parameters = {**sampling_parameters(self.settings, request), "detokenize": False}
        answer = self._servers.generate(request.stream, request.prompt_ids, parameters)
        self._running[answer] = request
        answer.add_done_callback(self._answered.put)

    def step(self) -> list[Completion]:
        """Return the requests that have finished; wait a moment if none has.

        Raises:
            RolloutError: if a server fails; of a child, if it fails a second time.
        """
        completions = []
        try:
            for answer in self._take_answers():
                request = self._running[answer]
                completions.append(
                    read_completion(request.request_id, answer.result(), self._label)
                )
                del self._running[answer]
        except ServerError as error:
            self._restart(error)
        except RolloutError:
            self._drop_requests()
            raise
        return completions

    def has_unfinished(self) -> bool:
        """Return whether :meth:`step` has work to do."""
        return bool(self._running)

    def cancel(self, request_ids: Collection[str]) -> None:
        """Forget requests; vLLM ends one whose connection closes."""
        wanted = set(request_ids)
        for answer, request in list(self._running.items()):
            if request.request_id in wanted:
                del self._running[answer]
                answer.cancel()

    def _take_answers(self) -> list[Future[Json]]:
        """Return the calls that have ended, waiting a moment for the first."""
        answers = []
        with suppress(queue.Empty):
            answers.append(self._answered.get(timeout=_STEP_S))
            while True:
                answers.append(self._answered.get_nowait())
        return [answer for answer in answers if answer in self._running]

    def _drop_requests(self) -> None:
        for answer in self._running:
            answer.cancel()
        self._running.clear()

    # --- weights ----------------------------------------------------------------------------

    def push_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy new weights into every server; see ``RolloutEngine.push_weights``.

        Raises:
            RolloutError: if requests are unfinished, or a server fails or refuses the weights.
        """
        self.require_idle()
        self._can_restart = True
        if self._process is not None and self._process.has_exited():
            self._weights = None  # the old ones
            self._restart(ServerError("Expected vLLM's server to live, got its end while idle."))
        if self._process is None and has_other_ranks():
            self._push_together(named_tensors, version)
        else:
            self._weights = named_tensors
            self._label = f"{self._run_id}/{version}"
            try:
                self._servers.push(named_tensors, self._label)
            except ServerError as error:
                self._restart(error)
        self.version = version

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
            self._restart(error)
            found_ST = self._servers.prompt_logprobs(token_ids)
        farthest_T = (found_ST - found_ST[0]).abs().argmax(dim=0)
        return found_ST.gather(0, farthest_T[None])[0]

    def close(self) -> None:
        """Stop the child and remove what was left of the weights."""
        atexit.unregister(self.close)
        self._drop_requests()
        self._stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    # --- servers ----------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """Process id of the child, which is that of its process group."""
        assert self._process is not None, "the servers run on other machines"
        return self._process.pid

    def _group(self, clients: list[ServerClient]) -> ServerGroup:
        return ServerGroup(clients, self._transfer, self._folder, self._dtype)

    def _start(self) -> None:
        """Start a child and wait until it serves."""
        process = ServerProcess(self._arguments, self._num_threads, [self._folder])
        client = ServerClient("http://vllm", process.socket, self._max_num_seqs, self._timeout_s)
        self._process, self._servers = process, self._group([client])
        deadline = time.monotonic() + self._start_timeout_s
        while not self._servers.is_healthy():
            if process.has_exited(_POLL_S) or time.monotonic() > deadline:
                raise ConfigError(
                    "Expected vLLM's server to start, got the log below. Change "
                    f"`data.engine.init_args`.\n{process.log_end()}"
                )
        self._servers.connect(self.max_model_len)

    def _restart(self, error: ServerError) -> None:
        """Bring a child that died back to where it was; raise what else is wrong."""
        lost = list(self._running.values())
        self._drop_requests()
        if self._process is None or self._servers.is_healthy():
            raise error
        if not self._process.has_exited(_DEATH_S):
            raise error
        log = self._process.log_end()
        is_iterator = self._weights is not None and iter(self._weights) is self._weights
        if not self._can_restart or is_iterator:
            raise ServerError(
                "Expected vLLM's server to live, got its end"
                + (" and weights that can be read only once" if is_iterator else " a second time")
                + f". Its log ends:\n{log}"
            ) from error
        self._can_restart = False
        logger.warning("vLLM's server died and is started once more. Its log ends:\n%s", log)
        self._stop()
        self._start()
        try:
            if self._weights is not None and self._label is not None:
                self._servers.push(self._weights, self._label)
        except ServerError as again:
            self._restart(again)  # which tells of the second death
        for request in lost:
            self.submit(request)

    def _stop(self) -> None:
        """Close every connection and stop the child."""
        self._servers.close()
        self._servers = self._group([])
        if self._process is not None:
            self._process.close()
            self._process = None

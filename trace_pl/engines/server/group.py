"""Several vLLM servers that hold the same weights, addressed as one."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from pathlib import Path

import torch
from torch import Tensor

from trace_pl.engines.protocol import Completion, FinishReason
from trace_pl.engines.server.client import Json, ServerClient
from trace_pl.engines.server.weight_files import WeightFiles
from trace_pl.errors import ConfigError, RolloutError, ServerError

_GENERATE = "/inference/v1/generate"


class ServerGroup:
    """Spreads requests over servers and gives every one the same weights.

    Args:
        clients: one for each server.
        transfer: how weights get there.
        folder: folder of their files.
        dtype: number format of the files; None keeps that of the tensors.
    """

    def __init__(
        self,
        clients: Sequence[ServerClient],
        transfer: WeightFiles,
        folder: Path,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._clients = clients
        self._transfer = transfer
        self._folder = folder
        self._dtype = dtype

    def connect(self, max_model_len: int) -> None:
        """Check each server and tell it where weights will come from.

        Raises:
            ConfigError: if a server reads shorter sequences.
            ServerError: if one cannot be reached or does not see the folder of weights.
        """
        for client in self._clients:
            length = client.get("/v1/models")["data"][0]["max_model_len"]
            if length < max_model_len:
                raise ConfigError(
                    f"Expected vLLM at {client.url} to read {max_model_len} tokens, got at most "
                    f"{length}. Lower `data.engine.init_args.max_model_len`, or raise "
                    "--max-model-len of the server."
                )
            if client.get("/is_paused")["is_paused"]:  # a trainer ended in the middle of a push
                with suppress(ServerError):
                    client.post("/finish_weight_update").result()
                client.post("/resume").result()
        self._all("/init_weight_transfer_engine", {"init_info": {"folder": str(self._folder)}})

    def is_healthy(self) -> bool:
        """Return whether every server says so."""
        try:
            for client in self._clients:
                client.get("/health")
        except ServerError:
            return False
        return True

    def generate(
        self, stream: str, token_ids: Sequence[int], parameters: Json, priority: int
    ) -> Future[Json]:
        """Send a prompt to the server that has seen the earlier turns of the same rollout.

        Args:
            stream: stream of the request; what precedes its last slash names the rollout.
            token_ids: the prompt.
            parameters: vLLM's sampling parameters.
            priority: lower numbers go first.
        """
        rollout = stream.rpartition("/")[0] or stream
        client = self._clients[zlib.crc32(rollout.encode()) % len(self._clients)]
        body = {"token_ids": list(token_ids), "sampling_params": parameters, "priority": priority}
        return client.post(_GENERATE, body)

    def prompt_logprobs(self, token_ids: Sequence[int]) -> Tensor:
        """Return what each of S servers finds for a prompt of T tokens.

        Returns:
            (S, T - 1) float32 in nats.
        """
        parameters = {"max_tokens": 1, "prompt_logprobs": 0, "seed": 0, "detokenize": False}
        body = {"token_ids": list(token_ids), "sampling_params": parameters}
        return torch.tensor(
            [
                [
                    found[str(token)]["logprob"]
                    for found, token in zip(answer["prompt_logprobs"], token_ids, strict=True)
                    if found is not None  # nothing precedes the first token
                ]
                for answer in self._all(_GENERATE, body)
            ]
        )

    def push(self, named_tensors: Iterable[tuple[str, Tensor]], label: str) -> None:
        """Give every server new weights and drop the prefixes cached with the old ones.

        Where that fails a server stays paused, for it holds weights of two policies.

        Args:
            named_tensors: parameters by their names in a saved checkpoint.
            label: returned by a server with everything that it samples with these weights.

        Raises:
            RolloutError: if a server fails or refuses.
        """
        self._all("/pause?mode=abort")
        self._all("/start_weight_update")
        with closing(self._transfer.write(named_tensors, self._folder, self._dtype)) as paths:
            for path in paths:
                self._all("/update_weights", {"update_info": {"path": str(path)}})
        self._all("/finish_weight_update", {"weight_version": label})
        if not all(answer["success"] for answer in self._all("/reset_prefix_cache")):
            raise RolloutError("Expected vLLM to drop its cached prefixes, got a refusal.")
        self._all("/resume")

    def close(self) -> None:
        """Give up what is on its way."""
        for client in self._clients:
            client.close()

    def _all(self, path: str, body: Json | None = None) -> list[Json]:
        """Call every server at the same time."""
        calls = [client.post(path, body) for client in self._clients]
        return [call.result() for call in calls]


def read_completion(request_id: str, answer: Json, label: str | None) -> Completion:
    """Return the completion in a server's answer, if it is whole and of the right weights.

    Args:
        request_id: id of the request that was answered.
        answer: the server's.
        label: label of the weights last pushed; None if there were none.

    Raises:
        RolloutError: if it was aborted, or sampled with other weights.
    """
    choice = answer["choices"][0]
    reason: FinishReason = choice["finish_reason"]
    if reason not in ("stop", "length"):
        raise RolloutError(
            f"Expected vLLM to finish a response, got the reason '{reason}'. Somebody else aborts "
            "requests or pushes weights to this server; use it for one run at a time."
        )
    labels = {span["version"] for span in choice["weight_versions"]}
    if label is not None and labels != {label}:
        raise RolloutError(
            f"Expected a response sampled with weights '{label}', got {sorted(labels)}. The server "
            "was restarted, or another run pushes weights to it."
        )
    logprobs = tuple(token["logprob"] for token in choice["logprobs"]["content"])
    return Completion(request_id, tuple(choice["token_ids"]), logprobs, reason)

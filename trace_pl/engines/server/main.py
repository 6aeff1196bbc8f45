"""`vllm serve` with what trace_pl needs of it: `python -m trace_pl.engines.server.main MODEL ...`.

It takes every option of `vllm serve`. Its control endpoints know no password: on a network that
others can reach, bind it to a private address with `--host`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Sequence

from trace_pl.engines.protocol import PREFILL_TOKENS
from trace_pl.engines.vllm.internals import (
    fork_server_engine,
    parse_serve,
    register_model_class,
    serve,
)
from trace_pl.engines.vllm.setup import cpu_settings, import_vllm
from trace_pl.errors import TraceError

STOP_WITH_STDIN = "--stop-with-stdin"
"""First argument of a server that ends when its standard input does."""
BACKEND = "trace_pl_files"
"""Name under which vLLM knows :class:`trace_pl.engines.server.worker.FileReceiver`."""

_GRACE_S = 10.0
_SERVE = [
    "--tokens-only",
    "--generation-config=vllm",  # a model's folder has no say in how the policy samples
    "--logprobs-mode=processed_logprobs",
    "--enable-prefix-caching",
    "--scheduling-policy=priority",
    "--no-async-scheduling",  # as on CPU, where all of this is tested
    f"--max-num-batched-tokens={PREFILL_TOKENS}",
    "--disable-log-stats",
    "--disable-uvicorn-access-log",
    "--uvicorn-log-level=warning",
    "--worker-extension-cls=trace_pl.engines.server.worker.WorkerExtension",
    f"--weight-transfer-config={json.dumps({'backend': BACKEND})}",
]


def main(arguments: Sequence[str]) -> None:
    """Serve until stopped.

    Args:
        arguments: those of `vllm serve`; they win over trace_pl's own where both speak.
    """
    arguments = list(arguments)
    if arguments[:1] == [STOP_WITH_STDIN]:
        del arguments[0]
        threading.Thread(target=_stop_with_stdin, daemon=True).start()
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # the endpoints that take weights
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # as `vllm serve` does
    vllm = import_vllm()
    is_cpu = vllm.platforms.current_platform.is_cpu()
    args = parse_serve([*_SERVE, *arguments])
    if is_cpu:
        # vLLM compiles a one-line function that ranks log-probs, which takes 20 s.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        fork_server_engine()
        for name, value in cpu_settings(args.max_model_len or 0).items():
            setattr(args, name, value)
        args.distributed_executor_backend = "uni"
    register_model_class(vllm, args.model_tag or args.model)
    serve(args)


def _stop_with_stdin() -> None:
    """Wait for the end of standard input, then end this process and its children.

    Every way in which the trainer can end closes the pipe, SIGKILL included. The lines that it
    wrote name folders to remove.
    """
    names = b""
    while block := os.read(sys.stdin.fileno(), 4096):
        names += block
    for folder in names.decode().splitlines():
        shutil.rmtree(folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_S)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except TraceError as problem:
        sys.exit(f"error: {problem}")

"""HTTP to a vLLM server: many calls at a time, each ends in an answer or in a ServerError."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from trace_pl.errors import ServerError

_CONNECT_S = 10.0
_ATTEMPTS = 3
_PAUSE_S = 0.5
_KEEP_S = 2.0  # shorter than vLLM keeps an idle connection, so none is used that it just closed
_ERROR_CHARS = 1000

Json = dict[str, Any]
T = TypeVar("T")


class ServerClient:
    """Calls to one server, made in a thread of its own.

    Args:
        url: address of the server, as a user would write it.
        socket: the server's Unix socket, if it listens on one.
        max_calls: calls on their way at the same time; more wait here.
        timeout_s: longest time in which the server answers nothing at all. One call may take
            longer while others are answered: it waits for its turn.
    """

    def __init__(self, url: str, socket: Path | None, max_calls: int, timeout_s: float) -> None:
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._last_answer = 0.0
        """``time.monotonic()`` of the newest answer to any call."""
        # A socket on this machine fails for good, a network may not.
        self._attempts = _ATTEMPTS if socket is None else 1
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._session = self._run(_open_session(socket, max_calls)).result()

    def post(self, path: str, body: Json | None = None) -> Future[Json]:
        """Begin a POST call and return its answer to come.

        The future raises a :class:`ServerError` if the server cannot be reached, answers with an
        error, or not in time.
        """
        return self._run(self._call("POST", path, body, self._timeout_s))

    def get(self, path: str) -> Json:
        """Make a GET call and return its answer."""
        return self._run(self._call("GET", path, None, _CONNECT_S)).result()

    def close(self) -> None:
        """Give up what is on its way and end the thread."""
        self._run(self._close()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _call(self, method: str, path: str, body: Json | None, timeout_s: float) -> Json:
        """Call, and wait for the answer as long as the server answers anything."""
        asking = asyncio.ensure_future(self._ask(method, path, body))
        begun = time.monotonic()
        try:
            while (left := max(begun, self._last_answer) + timeout_s - time.monotonic()) > 0.0:
                if (await asyncio.wait({asking}, timeout=left))[0]:
                    self._last_answer = time.monotonic()
                    return asking.result()
        finally:
            asking.cancel()
        raise ServerError(
            f"vLLM at {self.url} has answered nothing for {timeout_s:g} s, {path} among it. It "
            "hangs or is overloaded: look at its log, or raise `data.engine.init_args.timeout_s`."
        )

    async def _ask(self, method: str, path: str, body: Json | None) -> Json:
        """Call, again if the connection breaks: every call may be made twice."""
        timeout = aiohttp.ClientTimeout(sock_connect=_CONNECT_S)
        for attempt in range(1, self._attempts + 1):
            try:
                async with self._session.request(
                    method, f"{self.url}{path}", json=body, timeout=timeout
                ) as response:
                    if response.ok:
                        return await _json(response)
                    text = (await response.text())[:_ERROR_CHARS]
                    raise ServerError(
                        f"Expected vLLM at {self.url} to answer {path}, got status "
                        f"{response.status}: {text}"
                    )
            except aiohttp.ClientError as error:
                if attempt == self._attempts:
                    raise ServerError(
                        f"Expected vLLM at {self.url} to answer {path}, got {attempt} broken "
                        f"connections: {error}. Is it running, and can this machine reach it?"
                    ) from error
                await asyncio.sleep(_PAUSE_S * attempt)
        raise AssertionError("the loop returns or raises")

    async def _close(self) -> None:
        calls = asyncio.all_tasks() - {asyncio.current_task()}
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await self._session.close()


async def _open_session(socket: Path | None, max_calls: int) -> aiohttp.ClientSession:
    connector: aiohttp.BaseConnector
    if socket is not None:
        connector = aiohttp.UnixConnector(str(socket), limit=max_calls, keepalive_timeout=_KEEP_S)
    else:
        connector = aiohttp.TCPConnector(limit=max_calls, keepalive_timeout=_KEEP_S)
    return aiohttp.ClientSession(connector=connector)


async def _json(response: aiohttp.ClientResponse) -> Json:
    """Return the answer's object; some endpoints answer with nothing."""
    if response.content_type != "application/json":
        return {}
    answer = await response.json()
    return answer if isinstance(answer, dict) else {}

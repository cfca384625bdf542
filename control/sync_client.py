"""The synchronous client: an ``AsyncClient`` in a thread, which keeps the connection alive between calls."""

import asyncio
import os
import threading
from collections.abc import Coroutine, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from .async_client import AsyncClient, Chunk, ClientClosed, Stream
from .client_state import Finish
from .token_logprobs import TokenLogprob
from .wire import Sampling, StatusReply, Welcome
from .wire.client import GREEDY

T = TypeVar("T")


class Client:
    """The same for programs without an event loop. It keeps the connection alive in a thread of its own."""

    def __init__(self, endpoint: str, *, name: str = "python", keys: str | os.PathLike[str] | None = None) -> None:
        self._endpoint = endpoint
        self._name = name
        self._keys = keys
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._client: AsyncClient | None = None

    def open(self) -> None:
        """Connect. Returns at once."""
        client = AsyncClient(self._endpoint, name=self._name, keys=self._keys)
        loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=loop.run_forever, name="evenflow-client", daemon=True)
        self._thread.start()
        self._loop = loop
        self._client = client
        try:
            self._run(self._client.open())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Disconnect and end the thread. Idempotent."""
        if self._loop is None or self._thread is None or self._client is None:
            return
        self._run(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._loop = None

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def welcome(self) -> Welcome | None:
        return self._opened().welcome

    @property
    def connected(self) -> bool:
        return self._opened().connected

    def wait_connected(self, timeout: float | None = None) -> Welcome:
        """Wait until the control process has answered. Raises ``TimeoutError``."""
        return self._run(self._opened().wait_connected(timeout))

    def submit(
        self,
        tokens: Sequence[int],
        *,
        max_tokens: int = 0,
        sampling: Sampling = GREEDY,
        stop_ids: Sequence[int] = (),
        min_tokens: int = 0,
        salt: bytes = b"",
        request: str = "",
        leader: "SyncStream | None" = None,
        tenant: str = "",
        priority: int = 0,
        deadline_ms: int = 0,
        slo: str | int = "",
    ) -> "SyncStream":
        """As ``AsyncClient.submit``."""
        stream = self._run(
            self._opened().submit(
                tokens,
                max_tokens=max_tokens,
                sampling=sampling,
                stop_ids=stop_ids,
                min_tokens=min_tokens,
                salt=salt,
                request=request,
                leader=None if leader is None else leader._stream,
                tenant=tenant,
                priority=priority,
                deadline_ms=deadline_ms,
                slo=slo,
            )
        )
        return SyncStream(self, stream)

    def status(self, timeout: float = 5.0) -> StatusReply:
        """Ask for the service's counters. Raises ``TimeoutError``."""
        return self._run(self._opened().status(timeout))

    def _opened(self) -> AsyncClient:
        if self._client is None or self._loop is None:
            raise ClientClosed("the client is not open")
        return self._client

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop is None:
            work.close()
            raise ClientClosed("the client is not open")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


class SyncStream:
    """The tokens of one request as they come; ``close`` or leaving its ``with`` block aborts it."""

    def __init__(self, client: Client, stream: Stream) -> None:
        self._client = client
        self._stream = stream

    @property
    def finish(self) -> Finish | None:
        """How the request ended, or None while it has not."""
        return self._stream.finish

    @property
    def prompt_logprobs(self) -> list[TokenLogprob]:
        """Those of the prompt's tokens from the second on, if they were asked for. Complete with the first token."""
        return self._stream.prompt_logprobs

    def __iter__(self) -> Iterator[Chunk]:
        while self._client._run(self._stream.wait()):
            yield Chunk(self._stream.take(), self._stream.take_logprobs())

    def close(self) -> None:
        """Abort the request if it has not ended. Idempotent."""
        if self._stream.finish is None:
            self._client._run(self._stream.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

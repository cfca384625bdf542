"""The Python client of the ZeroMQ protocol, asynchronous and synchronous. Needs only pyzmq and msgspec.

::

    async with AsyncClient("ipc:///run/evenflow/clients") as client:
        async with await client.submit([1, 2, 3], max_tokens=16) as stream:
            async for chunk in stream:
                print(chunk.ids)
        print(stream.finish)

    with Client("ipc:///run/evenflow/clients") as client:
        for chunk in client.submit([1, 2, 3], max_tokens=16):
            print(chunk.ids)

The connection keeps itself alive: after a restart of the control process unfinished requests go on as
continuations, and a stream just pauses.
"""

from .async_client import AsyncClient, Chunk, ClientClosed, Stream, draw_seed
from .client_state import Finish
from .sync_client import Client, SyncStream
from .token_logprobs import TokenLogprob

__all__ = [
    "AsyncClient",
    "Chunk",
    "Client",
    "ClientClosed",
    "Finish",
    "Stream",
    "SyncStream",
    "TokenLogprob",
    "draw_seed",
]

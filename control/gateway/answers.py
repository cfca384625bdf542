"""The two shapes of an answer, whole and streamed, for completions and for chat.

A streamed answer gives, for each choice: the role (chat only), texts with ``finish_reason`` null, and exactly one
chunk with the reason and no text; then the usage, if asked for, and ``[DONE]``. If something fails after the headers
are out, an error event is the last one and there is no ``[DONE]``.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import structlog
from starlette.requests import Request
from starlette.responses import Response

from .errors import ApiError
from .generation import Generation
from .limits import HEADER_SECONDS
from .schema import (
    Answer,
    ChatChoice,
    CompletionChoice,
    Delta,
    DeltaChoice,
    Message,
    PromptDetails,
    Usage,
)
from .sse import DONE, EventResponse, EventWriter, while_connected

log = structlog.get_logger(__name__)
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Shape:
    """How one endpoint names and builds its choices. ``opening`` is the first chunk's, ``piece`` a text's, ``last``
    the one with the reason, ``whole`` an unstreamed answer's."""

    prefix: str
    whole_object: str
    chunk_object: str
    opening: Callable[[int], DeltaChoice] | None
    piece: Callable[[int, str], DeltaChoice | CompletionChoice]
    last: Callable[[int, str], DeltaChoice | CompletionChoice]
    whole: Callable[[int, str, str], ChatChoice | CompletionChoice]


COMPLETION = Shape(
    prefix="cmpl",
    whole_object="text_completion",
    chunk_object="text_completion",
    opening=None,
    piece=lambda index, text: CompletionChoice(index, text, None),
    last=lambda index, reason: CompletionChoice(index, "", reason),
    whole=lambda index, text, reason: CompletionChoice(index, text, reason),
)
CHAT = Shape(
    prefix="chatcmpl",
    whole_object="chat.completion",
    chunk_object="chat.completion.chunk",
    opening=lambda index: DeltaChoice(index, Delta(role="assistant", content=""), None),
    piece=lambda index, text: DeltaChoice(index, Delta(content=text), None),
    last=lambda index, reason: DeltaChoice(index, Delta(), reason),
    whole=lambda index, text, reason: ChatChoice(index, Message(text), reason),
)


async def answer(
    http: Request, shape: Shape, name: str, model: str, generations: list[Generation], *, stream: bool, usage: bool
) -> Response:
    """The response to a request whose generations have been submitted. Takes care of closing them."""
    identifier = f"{shape.prefix}-{name}"
    created = int(time.time())
    handed_over = False
    try:
        if not stream:
            body = await while_connected(http.receive, _whole(shape, identifier, created, model, generations))
            return Response(body, media_type="application/json")
        await while_connected(http.receive, _settle(generations))

        async def produce(writer: EventWriter) -> None:
            await _stream(writer, shape, identifier, created, model, generations, usage)

        handed_over = True
        return EventResponse(produce, lambda: _close(generations))
    finally:
        if not handed_over:
            _close(generations)


async def _settle(generations: list[Generation]) -> None:
    """Wait a moment for the first token or a refusal, so that a refusal gets its own HTTP status."""
    waits = [asyncio.ensure_future(generation.news()) for generation in generations]
    try:
        await asyncio.wait(waits, timeout=HEADER_SECONDS)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
    for generation in generations:
        if error := generation.refusal():
            raise error


async def _whole(shape: Shape, identifier: str, created: int, model: str, generations: list[Generation]) -> bytes:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_text(generation)) for generation in generations]
    results = [task.result() for task in tasks]
    for result in results:
        if isinstance(result, ApiError):
            raise result
    choices = [
        shape.whole(index, str(text), generation.finish_reason or "stop")
        for index, (text, generation) in enumerate(zip(results, generations, strict=True))
    ]
    usage = await _usage(generations)
    return _encode(Answer(identifier, shape.whole_object, created, model, choices, usage))  # pyright: ignore[reportArgumentType]


async def _text(generation: Generation) -> str | ApiError:
    """The whole text; an error is returned, not raised, so that it reaches the caller as itself."""
    pieces: list[str] = []
    try:
        while (piece := await generation.piece()) is not None:
            pieces.append(piece)
    except ApiError as error:
        return error
    return "".join(pieces)


async def _stream(
    writer: EventWriter,
    shape: Shape,
    identifier: str,
    created: int,
    model: str,
    generations: list[Generation],
    usage: bool,
) -> None:
    #: With usage asked for, every other chunk says that it has none.
    absent = None if usage else msgspec.UNSET

    async def chunk(choice: DeltaChoice | CompletionChoice) -> None:
        message = Answer(identifier, shape.chunk_object, created, model, [choice], absent)  # pyright: ignore[reportArgumentType]
        await writer.event(_encode(message))

    failed: list[ApiError] = []

    async def run(index: int, generation: Generation) -> None:
        try:
            if shape.opening is not None:
                await chunk(shape.opening(index))
            while (piece := await generation.piece()) is not None:
                await chunk(shape.piece(index, piece))
            await chunk(shape.last(index, generation.finish_reason or "stop"))
        except ApiError as error:
            # Ends the other choices, too: the first error is the one that is told.
            failed.append(error)
            _close(generations)

    if len(generations) == 1:
        await run(0, generations[0])
    else:
        async with asyncio.TaskGroup() as group:
            for index, generation in enumerate(generations):
                group.create_task(run(index, generation))
    if failed:
        await writer.event(failed[0].body())
        return
    if usage:
        figures = await _usage(generations)
        await writer.event(_encode(Answer(identifier, shape.chunk_object, created, model, [], figures)))
    await writer.event(DONE)


async def _usage(generations: list[Generation]) -> Usage:
    for generation in generations:
        await generation.settle()
    prompt = sum(generation.prompt_tokens for generation in generations)
    completion = sum(generation.completion_tokens for generation in generations)
    cached = sum(generation.cached_tokens for generation in generations)
    return Usage(prompt, completion, prompt + completion, PromptDetails(cached))


def _close(generations: list[Generation]) -> None:
    for generation in generations:
        generation.close()

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
from msgspec import UNSET, UnsetType, structs
from starlette.requests import Request
from starlette.responses import Response

from .errors import ApiError
from .generation import Generation, Piece
from .limits import HEADER_SECONDS
from .logprobs import Reported, chat_logprobs, completion_logprobs
from .schema import (
    Answer,
    ChatChoice,
    ChatLogprobs,
    CompletionChoice,
    CompletionLogprobs,
    Delta,
    DeltaChoice,
    Message,
    PromptDetails,
    PromptLogprobs,
    Usage,
)
from .sse import DONE, EventResponse, EventWriter, while_connected

log = structlog.get_logger(__name__)
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks of the form of its answer. ``name`` and ``model`` are written into it."""

    name: str
    model: str
    stream: bool
    usage: bool
    #: The usage so far, in every chunk.
    continuous: bool = False
    #: Alternatives for each token of the prompt, None for no log-probabilities of it.
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Shape:
    """How one endpoint names and builds its choices. ``opening`` is the first chunk's, ``piece`` a text's, ``last``
    the one with the reason, ``whole`` an unstreamed answer's."""

    prefix: str
    whole_object: str
    chunk_object: str
    opening: Callable[[int], DeltaChoice] | None
    piece: Callable[[int, Piece], DeltaChoice | CompletionChoice]
    last: Callable[[int, str], DeltaChoice | CompletionChoice]
    whole: Callable[[int, Piece, str], ChatChoice | CompletionChoice]


COMPLETION = Shape(
    prefix="cmpl",
    whole_object="text_completion",
    chunk_object="text_completion",
    opening=None,
    piece=lambda index, piece: CompletionChoice(index, piece.text, None, _columns(piece)),
    last=lambda index, reason: CompletionChoice(index, "", reason),
    whole=lambda index, piece, reason: CompletionChoice(index, piece.text, reason, _columns(piece)),
)
CHAT = Shape(
    prefix="chatcmpl",
    whole_object="chat.completion",
    chunk_object="chat.completion.chunk",
    opening=lambda index: DeltaChoice(index, Delta(role="assistant", content=""), None),
    piece=lambda index, piece: DeltaChoice(index, Delta(content=piece.text), None, _contents(piece)),
    last=lambda index, reason: DeltaChoice(index, Delta(), reason),
    whole=lambda index, piece, reason: ChatChoice(index, Message(piece.text), reason, _contents(piece)),
)


def _columns(piece: Piece) -> CompletionLogprobs | None:
    return None if piece.told is None else completion_logprobs(piece.told)


def _contents(piece: Piece) -> ChatLogprobs | None:
    return None if piece.told is None else chat_logprobs(piece.told)


async def answer(http: Request, shape: Shape, asked: Asked, generations: list[Generation]) -> Response:
    """The response to a request whose generations have been submitted. Takes care of closing them."""
    identifier = f"{shape.prefix}-{asked.name}"
    created = int(time.time())
    handed_over = False
    try:
        if not asked.stream:
            body = await while_connected(http.receive, _whole(shape, identifier, created, asked, generations))
            return Response(body, media_type="application/json")
        await while_connected(http.receive, _settle(generations))

        async def produce(writer: EventWriter) -> None:
            await _stream(writer, shape, identifier, created, asked, generations)

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


async def _whole(shape: Shape, identifier: str, created: int, asked: Asked, generations: list[Generation]) -> bytes:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_text(generation, generations)) for generation in generations]
    pieces: list[Piece] = []
    failed: list[ApiError] = []
    for result in [task.result() for task in tasks]:
        if isinstance(result, Piece):
            pieces.append(result)
        else:
            failed.append(result)
    if failed:
        # Those that were ended on account of the first one say only that.
        raise next((error for error in failed if error.code != "aborted"), failed[0])
    choices = [
        shape.whole(index, piece, generation.finish_reason or "stop")
        for index, (piece, generation) in enumerate(zip(pieces, generations, strict=True))
    ]
    prompt: PromptLogprobs | UnsetType = UNSET
    if asked.prompt_logprobs is not None:
        found = [generation.prompt_logprobs(asked.prompt_logprobs) for generation in generations]
        if shape is COMPLETION:
            choices = [
                structs.replace(choice, prompt_logprobs=rows) for choice, rows in zip(choices, found, strict=True)
            ]
        else:
            prompt = found[0]
    usage = await _usage(generations)
    return _encode(Answer(identifier, shape.whole_object, created, asked.model, choices, usage, prompt))  # pyright: ignore[reportArgumentType]


async def _text(generation: Generation, all_of_them: list[Generation]) -> Piece | ApiError:
    """The whole choice. An error ends the others, too; it is returned, not raised: so it arrives as itself."""
    pieces: list[str] = []
    told: list[Reported] | None = [] if generation.reports else None
    try:
        while (piece := await generation.piece()) is not None:
            pieces.append(piece.text)
            if told is not None and piece.told is not None:
                told += piece.told
    except ApiError as error:
        _close(all_of_them)
        return error
    return Piece("".join(pieces), told)


async def _stream(
    writer: EventWriter,
    shape: Shape,
    identifier: str,
    created: int,
    asked: Asked,
    generations: list[Generation],
) -> None:
    #: With usage asked for, every other chunk says that it has none.
    absent = None if asked.usage else UNSET
    model = asked.model

    async def chunk(choice: DeltaChoice | CompletionChoice, generation: Generation) -> None:
        usage = _so_far(generation) if asked.continuous else absent
        message = Answer(identifier, shape.chunk_object, created, model, [choice], usage)  # pyright: ignore[reportArgumentType]
        await writer.event(_encode(message))

    failed: list[ApiError] = []

    async def run(index: int, generation: Generation) -> None:
        try:
            if shape.opening is not None:
                await chunk(shape.opening(index), generation)
            while (piece := await generation.piece(asked.continuous)) is not None:
                await chunk(shape.piece(index, piece), generation)
            await chunk(shape.last(index, generation.finish_reason or "stop"), generation)
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
    if asked.usage:
        figures = await _usage(generations)
        await writer.event(_encode(Answer(identifier, shape.chunk_object, created, model, [], figures)))
    await writer.event(DONE)


def _so_far(generation: Generation) -> Usage:
    """Of one choice, as vLLM has it: its whole prompt, and the tokens that are out with this chunk or before."""
    prompt, completion = generation.prompt_length, generation.completion_tokens
    return Usage(prompt, completion, prompt + completion, PromptDetails(generation.cached_tokens))


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

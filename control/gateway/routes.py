"""The routes of the gateway: OpenAI's completions, chat and models, tokenizing, health and metrics."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from .answers import CHAT, COMPLETION, Asked, answer
from .errors import ApiError, invalid
from .limits import BODY_SECONDS, MAX_BODY_BYTES
from .prompts import message_chars, normalize_messages, render_chat, split_prompts
from .schema import (
    ChatRequest,
    CommonFields,
    CompletionRequest,
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizeAnswer,
    TokenizeRequest,
)
from .service import Prompt, Service, check_stream_options
from .sse import ClientGone

T = TypeVar("T", bound=msgspec.Struct)
Endpoint = Callable[[Request], Awaitable[Response]]

#: Paths whose requests are work: counted, refused while draining.
WORK_PATHS = frozenset({"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"})


class Routes:
    """The endpoints, bound to one service."""

    def __init__(self, service: Service, version: str) -> None:
        self._service = service
        self._version = version

    def table(self) -> list[Route]:
        get: dict[str, Endpoint] = {
            "/health": self.health,
            "/ready": self.ready,
            "/version": self.version,
            "/metrics": self.metrics,
            "/v1/models": self.models,
            "/v1/models/{name:path}": self.model,
            "/tokenizer_info": self.tokenizer_info,
        }
        post: dict[str, Endpoint] = {
            "/v1/completions": self.completions,
            "/v1/chat/completions": self.chat,
            "/tokenize": self.tokenize,
            "/detokenize": self.detokenize,
        }
        return [Route(path, endpoint, methods=["GET"]) for path, endpoint in get.items()] + [
            Route(path, endpoint, methods=["POST"]) for path, endpoint in post.items()
        ]

    async def completions(self, http: Request) -> Response:
        service = self._service
        service.check_load()
        request = await self._read(http, CompletionRequest)
        service.check_model(request.model)
        usage = check_stream_options(request)
        texts = split_prompts(request.prompt)
        welcome = await service.limits()
        wish = service.read(request, welcome)
        specials = request.add_special_tokens is not False
        prompts: list[Prompt] = []
        for index, given in enumerate(texts):
            param = f"prompt[{index}]" if len(texts) > 1 else "prompt"
            ids = await service.encode(given, welcome, param, add_special_tokens=specials)
            prompts.append(Prompt(ids, given if isinstance(given, str) else None))
        generations = await service.start(prompts, wish, http.state.request_id)
        return await answer(http, COMPLETION, self._asked(http, request, usage), generations)

    async def chat(self, http: Request) -> Response:
        service = self._service
        service.check_load()
        request = await self._read(http, ChatRequest)
        service.check_model(request.model)
        usage = check_stream_options(request)
        wish = service.read(request, await service.limits())
        ids = await self._chat_ids(
            request.messages, request.add_generation_prompt is not False, request.chat_template_kwargs
        )
        generations = await service.start([Prompt(ids)], wish, http.state.request_id)
        return await answer(http, CHAT, self._asked(http, request, usage), generations)

    async def tokenize(self, http: Request) -> Response:
        service = self._service
        request = await self._read(http, TokenizeRequest)
        service.check_model(request.model)
        welcome = await service.limits()
        if (request.prompt is None) == (request.messages is None):
            raise invalid("send either prompt or messages", "prompt")
        if request.messages is not None:
            ids = await self._chat_ids(
                request.messages, request.add_generation_prompt is not False, request.chat_template_kwargs
            )
        elif request.prompt:
            specials = request.add_special_tokens is not False
            ids = await service.encode(request.prompt, welcome, "prompt", add_special_tokens=specials)
        else:
            ids = []
        return _json(TokenizeAnswer(ids, len(ids), welcome.max_model_len))

    async def detokenize(self, http: Request) -> Response:
        service = self._service
        request = await self._read(http, DetokenizeRequest)
        service.check_model(request.model)
        welcome = await service.limits()
        ids = await service.encode(request.tokens, welcome, "tokens", add_special_tokens=False)
        text = await service.run(len(ids), lambda: service.model.decode(ids, skip_special_tokens=False))
        return _json(DetokenizeAnswer(text))

    async def tokenizer_info(self, _: Request) -> Response:
        model = self._service.model
        return JSONResponse({**model.specials, "chat_template": model.chat_template})

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card(name) for name in self._service.names]})

    async def model(self, http: Request) -> Response:
        name = http.path_params["name"]
        self._service.check_model(name)
        return JSONResponse(self._card(name))

    async def health(self, _: Request) -> Response:
        """The gateway lives and hears the control process."""
        if self._service.client.connected:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "the control process does not answer"}, 503)

    async def ready(self, _: Request) -> Response:
        """A request sent now would be served."""
        if self._service.ready:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "draining" if self._service.draining else "not ready"}, 503)

    async def version(self, _: Request) -> Response:
        return JSONResponse({"version": self._version})

    async def metrics(self, _: Request) -> Response:
        return Response(self._service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def _asked(self, http: Request, request: CommonFields, usage: tuple[bool, bool]) -> Asked:
        return Asked(
            name=http.state.request_id,
            model=self._service.names[0],
            stream=bool(request.stream),
            usage=usage[0],
            continuous=usage[1],
            prompt_logprobs=request.prompt_logprobs,
        )

    def _card(self, name: str) -> dict[str, Any]:
        welcome = self._service.client.welcome
        length = 0 if welcome is None else min(welcome.max_model_len, welcome.max_sequence)
        return {
            "id": name,
            "object": "model",
            "created": self._service.created,
            "owned_by": "evenflow",
            "root": self._service.names[0],
            "parent": None,
            "max_model_len": length or None,
            "default_sampling": self._service.defaults.fields(),
        }

    async def _chat_ids(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool, variables: dict[str, Any] | None
    ) -> list[int]:
        service = self._service
        normal = normalize_messages(messages)
        template = service.usable_template()
        welcome = await service.limits()
        text = await service.run(
            message_chars(normal), lambda: render_chat(template, normal, add_generation_prompt, variables)
        )
        # The template wrote the special tokens itself.
        return await service.encode(text, welcome, "messages", add_special_tokens=False)

    async def _read(self, http: Request, kind: type[T]) -> T:
        body = await read_body(http)
        # A large body takes long to parse, and parsing holds the interpreter's lock all the same.
        return self._service.fields.read(body, kind)


async def read_body(http: Request) -> bytes:
    """The body, if it is not too large and does not come too slowly. Raises ``ApiError`` or ``ClientGone``."""
    announced = http.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > MAX_BODY_BYTES:
        raise _too_large()
    pieces: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in http.stream():
                size += len(piece)
                if size > MAX_BODY_BYTES:
                    raise _too_large()
                pieces.append(piece)
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {BODY_SECONDS:g} s") from None
    except ClientDisconnect:
        raise ClientGone from None
    return b"".join(pieces)


def _too_large() -> ApiError:
    return ApiError(413, f"the body may have at most {MAX_BODY_BYTES} bytes", code="request_too_large")


def _json(value: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")

"""What the server understands, found by trying: prompts as token ids, usage in each chunk, ``ignore_eos``.

One short streamed request before the run (more where something is refused), which also warms the server up.
"""

import socket
import ssl
import urllib.parse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import httpx
import msgspec

from ..openai_http import ServerError, base_url, connect, first_model
from .client import Target

_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem"
    " hand part place case week company system program question work number night point home water room mother"
    " area money story fact month lot right study book eye job word business issue side kind head house service"
    " friend father power hour game line end member law car city community name team minute idea body back parent"
    " face others level office door health person art war history party result change morning reason research girl"
    " moment air teacher force education river green paper stone quick light sound small bright music garden winter"
)
#: Plain English words: about a token each with most tokenizers.
WORDS: list[str] = [*_TEXT.split()]
#: Answers that mean: a field of the request is not understood.
_REFUSALS = frozenset({400, 415, 422, 500, 501})


@dataclass(frozen=True, slots=True)
class Abilities:
    """``ids``: token ids to make prompts of, None for words; ``options``: fields that each request carries."""

    ids: list[int] | None
    options: dict[str, Any]
    model: str
    chat: bool


_USAGE = {"include_usage": True}
_EVERY = {"include_usage": True, "continuous_usage_stats": True}
#: From the best to what every server understands.
_OPTIONS: tuple[dict[str, Any], ...] = (
    {"ignore_eos": True, "stream_options": _EVERY},
    {"ignore_eos": True, "stream_options": _USAGE},
    {"stream_options": _USAGE},
    {},
)


def split_url(url: str, chat: bool) -> tuple[str, bool]:
    """The API's base URL, and whether chat is meant: a URL may name the endpoint itself."""
    url = url.rstrip("/")
    for suffix, is_chat in (("/chat/completions", True), ("/completions", False)):
        if url.endswith(suffix):
            return base_url(url.removesuffix(suffix)), is_chat
    return base_url(url), chat


def explore(base: str, chat: bool, model: str | None) -> Abilities:
    """Ask the server. Raises ``ServerError`` if it cannot be reached or answers no request at all."""
    with connect(base) as client:
        client.timeout = httpx.Timeout(120.0, connect=5.0)
        model = model or first_model(client)
        ids = None if chat else _token_ids(client, base, model)
        last = ""
        for given in [ids, None] if ids else [None]:
            for options in _OPTIONS:
                abilities = Abilities(given, options, model, chat)
                response = _try(client, request_body(abilities, _sample(given), 2))
                if response.status_code == 200:
                    return abilities
                last = f"The server answered {response.status_code}: {response.text.strip()[:300]}"
                if response.status_code not in _REFUSALS:
                    raise ServerError(last)
        raise ServerError(last)


def _sample(ids: list[int] | None) -> Sequence[int] | Sequence[str]:
    return WORDS[:8] if ids is None else (ids * 8)[:8]


def _try(client: httpx.Client, body: dict[str, Any]) -> httpx.Response:
    path = "chat/completions" if "messages" in body else "completions"
    try:
        return client.post(path, json=body)
    except httpx.HTTPError as error:
        raise ServerError(f"No answer from {client.base_url}: {error or type(error).__name__}.") from None


def _token_ids(client: httpx.Client, base: str, model: str) -> list[int] | None:
    """Ids of ordinary words, from servers that tokenize for their clients (vLLM, SGLang, evenflow)."""
    root = base.removesuffix("/v1")
    try:
        response = client.post(f"{root}/tokenize", json={"model": model, "prompt": _TEXT})
        tokens = response.json()["tokens"] if response.status_code == 200 else None
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return None
    if not isinstance(tokens, list):
        return None
    found: Iterator[Any] = iter(tokens)  # pyright: ignore[reportUnknownArgumentType]
    ids = sorted({token for token in found if isinstance(token, int) and token >= 0})
    # A handful of ids would make prompts that share their beginnings.
    return ids if len(ids) >= 16 else None


def request_body(abilities: Abilities, prompt: Sequence[int] | Sequence[str], output: int) -> dict[str, Any]:
    """The fields of a request for ``output`` tokens after ``prompt``, ids or words."""
    body: dict[str, Any] = {"model": abilities.model, "max_tokens": output, "temperature": 0, "stream": True}
    body |= abilities.options
    if abilities.ids is not None:
        return body | {"prompt": prompt}
    text = " ".join(cast(Sequence[str], prompt))
    return body | ({"messages": [{"role": "user", "content": text}]} if abilities.chat else {"prompt": text})


def encode_body(body: dict[str, Any]) -> bytes:
    return msgspec.json.encode(body)


def find_target(base: str, chat: bool, api_key: str | None) -> Target:
    """Resolve the server's name once, to an address that answers. Raises ``ServerError``."""
    parts = urllib.parse.urlsplit(base)
    host, tls = parts.hostname or "", parts.scheme == "https"
    port = parts.port or (443 if tls else 80)
    error: OSError | None = None
    for *_, place in _resolve(host, port):
        try:
            with socket.create_connection((place[0], port), timeout=5.0):
                break
        except OSError as refused:
            error = refused
    else:
        raise ServerError(f"No server answers at {base}: {error}.")
    path = f"{parts.path}/{'chat/completions' if chat else 'completions'}"
    lines = [
        f"POST {path} HTTP/1.1",
        f"host: {parts.netloc.rpartition('@')[2]}",
        "content-type: application/json",
        "accept: text/event-stream",
        "connection: close",
    ]
    if api_key:
        lines.append(f"authorization: Bearer {api_key}")
    head = ("\r\n".join(lines) + "\r\n").encode()
    return Target(str(place[0]), port, head, ssl.create_default_context() if tls else None, host)


def _resolve(host: str, port: int) -> list[Any]:
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ServerError(f"The name {host} has no address: {error}.") from None

"""The OpenAI-compatible API as a client sees it: base URL, requests, streams, errors as one sentence.

Used by ``generate``, ``chat`` and ``status``. Works with any server of that API, so nothing here knows
evenflow.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import httpx

DEFAULT_URL = "http://127.0.0.1:8000/v1"
#: Seconds for a connection; an answer may take as long as it takes.
CONNECT_SECONDS = 5.0


class ServerError(Exception):
    """The server cannot be reached or refused; the text is the sentence for the user."""


@dataclass(frozen=True, slots=True)
class Draw:
    """How the answer is drawn; None leaves it to the server."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop: tuple[str, ...] | None = None
    seed: int | None = None

    def fields(self) -> dict[str, Any]:
        """Those that were given, as a request has them."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def base_url(url: str | None) -> str:
    """``http://host:port`` and ``http://host:port/v1/`` both mean ``http://host:port/v1``."""
    base = (url or DEFAULT_URL).rstrip("/")
    if "://" not in base:
        base = f"http://{base}"
    return base if base.endswith("/v1") else f"{base}/v1"


def connect(url: str | None) -> httpx.Client:
    """A client whose paths are relative to the API's base. The key comes from ``OPENAI_API_KEY``."""
    key = os.environ.get("OPENAI_API_KEY")
    return httpx.Client(
        base_url=base_url(url),
        timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
        headers={"Authorization": f"Bearer {key}"} if key else {},
    )


def _sentence(response: httpx.Response) -> str:
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = response.text.strip()[:300] or response.reason_phrase
    return f"The server answered {response.status_code}: {message}"


def get_json(client: httpx.Client, path: str) -> Any:
    try:
        response = client.get(path)
    except httpx.HTTPError as error:
        raise _unreachable(client, error) from None
    if response.is_error:
        raise ServerError(_sentence(response))
    return response.json()


def _unreachable(client: httpx.Client, error: httpx.HTTPError) -> ServerError:
    return ServerError(f"No server answers at {client.base_url}: {error or type(error).__name__}.")


def first_model(client: httpx.Client) -> str:
    """The id of the first model that the server offers."""
    models = get_json(client, "models").get("data") or []
    if not models:
        raise ServerError("The server offers no model.")
    return str(models[0]["id"])


def stream(client: httpx.Client, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The chunks of a streamed answer. Raises ``ServerError``, also for an error inside the stream."""
    try:
        with client.stream("POST", path, json={**body, "stream": True}) as response:
            if response.is_error:
                response.read()
                raise ServerError(_sentence(response))
            for line in response.iter_lines():
                if not line.startswith("data:"):
                    continue
                data = line[5:].strip()
                if data == "[DONE]":
                    return
                chunk = json.loads(data)
                if "error" in chunk:
                    raise ServerError(str(chunk["error"].get("message", chunk["error"])))
                yield chunk
    except httpx.ConnectError as error:
        raise _unreachable(client, error) from None
    except httpx.HTTPError as error:
        raise ServerError(f"The connection was lost: {error or type(error).__name__}.") from None
    raise ServerError("The stream ended before the answer was complete.")

"""What all routes of one gateway share, and the way of a request from its fields to the control process."""

import asyncio
import hashlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

from ..client import AsyncClient, Stream
from ..wire import Sampling, Welcome
from .chat_template import ChatTemplate, TemplateError
from .defaults import SamplingDefaults
from .errors import ApiError, invalid, overloaded, unavailable
from .fields import FieldReader, check_ranges
from .generation import Generation, PromptRows, Reporting, Stopping
from .limits import (
    CONNECT_SECONDS,
    FULL_SECONDS,
    INLINE_CHARS,
    MAX_CHOICES,
    MAX_PROMPT_LOGPROBS,
    MAX_SLO_NAME,
    MAX_STOP_CHARS,
    MAX_STOP_IDS,
    MAX_STOPS,
    MAX_TENANT,
)
from .metrics import Metrics
from .prompts import check_ids, check_size
from .sampling import count_choices, of_choice, read_sampling
from .schema import ChatRequest, CommonFields, CompletionRequest
from .tokenizer import TextModel

T = TypeVar("T")

_MAX_WIRE_STOP_IDS = 64


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and the text that they were made of, if they were."""

    ids: list[int]
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Wish:
    """What a request asks for besides its prompt, checked. ``max_tokens`` None: as many as fit."""

    sampling: Sampling
    stopping: Stopping
    choices: int
    max_tokens: int | None
    salt: bytes
    echo: bool
    tenant: str = ""
    priority: int = 0
    deadline_ms: int = 0
    #: Class of the time between tokens, or a target in milliseconds.
    slo: str | int = ""


class Service:
    """One gateway's connection, model and books."""

    def __init__(
        self, client: AsyncClient, model: TextModel, names: list[str], defaults: SamplingDefaults | None = None
    ) -> None:
        self.client = client
        self.model = model
        self.defaults = defaults or SamplingDefaults()
        #: Served model names; the first is the one that answers carry.
        self.names = names
        self.created = int(time.time())
        self.fields = FieldReader()
        self.metrics = Metrics(names[0], lambda: client.last_status, lambda: client.connected)
        #: Encoding and rendering of long texts; encoding releases the interpreter lock.
        self.threads = ThreadPoolExecutor(2, thread_name_prefix="text")
        self.draining = False
        #: Requests for work that are under way.
        self.active = 0
        self._full_until = 0.0
        self._retry_after = FULL_SECONDS
        self.template: ChatTemplate | None = None
        self.template_error: str | None = None
        if model.chat_template is not None:
            try:
                self.template = ChatTemplate(model.chat_template, model.specials)
            except TemplateError as error:
                self.template_error = str(error)

    @property
    def ready(self) -> bool:
        """New requests would be served now."""
        client = self.client
        status = client.last_status
        draining = self.draining or (status is not None and status.draining)
        return client.connected and client.welcome is not None and client.welcome.ready and not draining

    async def limits(self) -> Welcome:
        """The service's limits. Waits for a control process that is being restarted, or that knows no worker yet."""
        client = self.client

        def known() -> bool:
            return client.connected and client.welcome is not None and client.welcome.max_model_len > 0

        try:
            await client.wait_for(known, CONNECT_SECONDS)
        except TimeoutError:
            what = "the model is not loaded yet" if client.connected else "the control process does not answer"
            raise unavailable(what, 2.0, "not_ready") from None
        assert client.welcome is not None
        return client.welcome

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """Do ``work`` on a text of ``size`` characters: here if it is short, in a thread if it is not."""
        if size <= INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self.threads, work)

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.names:
            served = ", ".join(self.names)
            raise ApiError(
                404,
                f"the model {name!r:.256} does not exist here; served: {served}",
                param="model",
                code="model_not_found",
            )

    def usable_template(self) -> ChatTemplate | None:
        if self.template_error is not None:
            raise invalid(self.template_error, "messages", "chat_template_error")
        return self.template

    async def encode(
        self, prompt: str | list[int], welcome: Welcome, param: str, *, add_special_tokens: bool
    ) -> list[int]:
        """Token ids of a text (or of ids, which are checked). Raises ``ApiError``."""
        if isinstance(prompt, list):
            await self.run(len(prompt), lambda: check_ids(prompt, welcome.vocab_size, param))
            return prompt
        check_size(prompt, self.model, welcome.max_model_len, param)
        ids = await self.run(len(prompt), lambda: self.model.encode(prompt, add_special_tokens=add_special_tokens))
        if not ids:
            raise invalid(f"{param} gives no tokens", param)
        return ids

    def read(self, request: CommonFields, welcome: Welcome) -> Wish:
        """Check all fields but the prompt, before that is tokenized. Raises ``ApiError``."""
        check_ranges(request)
        limit = output_limit(request)
        echo = isinstance(request, CompletionRequest) and bool(request.echo)
        if limit == 0 and not echo:
            raise invalid("max_tokens must be at least 1, or 0 with echo, got 0", "max_tokens")
        return Wish(
            sampling=read_sampling(request, welcome.vocab_size, self.defaults),
            stopping=self._stopping(request, welcome),
            choices=count_choices(request),
            max_tokens=limit,
            salt=_salt(request),
            echo=echo,
            tenant=_tenant(request),
            priority=request.priority or 0,
            deadline_ms=request.deadline_ms or 0,
            slo=_slo(request),
        )

    async def start(self, prompts: list[Prompt], wish: Wish, name: str) -> list[Generation]:
        """Submit the choices of each prompt, by prompt. Raises ``ApiError`` before any is submitted."""
        welcome = await self.limits()
        total = len(prompts) * wish.choices
        if total > MAX_CHOICES:
            text = (
                f"{len(prompts)} prompts with n {wish.choices} make {total} choices, at most {MAX_CHOICES} are made"
            )
            raise invalid(text, "n")
        budgets = [self._max_tokens(len(prompt.ids), wish, welcome) for prompt in prompts]
        values = sum(len(prompt.ids) for prompt in prompts) * (1 + wish.sampling.prompt_logprobs) * wish.choices
        if values > MAX_PROMPT_LOGPROBS:
            text = f"the prompts would have {values} log-probabilities, at most {MAX_PROMPT_LOGPROBS} are reported"
            raise invalid(text, "logprobs" if wish.echo else "prompt_logprobs")
        generations: list[Generation] = []
        try:
            for prompt, budget in zip(prompts, budgets, strict=True):
                leader: Stream | None = None
                reporting = self._reporting(prompt, wish)
                for index in range(wish.choices):
                    stream = await self.client.submit(
                        prompt.ids,
                        max_tokens=budget,
                        sampling=of_choice(wish.sampling, index),
                        stop_ids=sorted(wish.stopping.ids),
                        min_tokens=wish.stopping.min_tokens,
                        salt=wish.salt,
                        request=name if total == 1 else f"{name}-{len(generations)}",
                        leader=leader,
                        tenant=wish.tenant,
                        priority=wish.priority,
                        deadline_ms=wish.deadline_ms,
                        slo=wish.slo,
                    )
                    if leader is None:
                        leader = stream
                        if wish.sampling.prompt_logprobs >= 0:
                            reporting = replace(reporting, rows=PromptRows(stream, prompt.ids))
                    generations.append(
                        Generation(stream, self.model, wish.stopping, self.metrics, prompt.ids, index, reporting)
                    )
        except BaseException:
            for generation in generations:
                generation.close()
            raise
        return generations

    def _reporting(self, prompt: Prompt, wish: Wish) -> Reporting:
        echo = None
        if wish.echo:
            skip = wish.stopping.skip_special_tokens
            echo = self.model.decode(prompt.ids, skip_special_tokens=skip) if prompt.text is None else prompt.text
        return Reporting(logprobs=wish.sampling.logprobs, echo=echo, muted=wish.max_tokens == 0)

    def check_load(self) -> None:
        """Refuse at once, before a body is read, while the queue is known to be full. Raises ``ApiError``."""
        status = self.client.last_status
        full = time.monotonic() < self._full_until
        if not full and status is not None and self.client.connected:
            most = status.values.get("max_queued", 0.0)
            full = 0 < most <= status.values.get("num_requests_waiting", 0.0)
        if full:
            wait = 0.0 if status is None else status.values.get("retry_after_seconds", 0.0)
            raise overloaded("too many requests are waiting", wait or self._retry_after)

    def note(self, error: ApiError) -> None:
        """A request was answered with ``error``: count it, and remember a queue that is full."""
        self.metrics.refused(error.code or str(error.status))
        if error.queue_full:
            self._retry_after = error.retry_after or FULL_SECONDS
            self._full_until = time.monotonic() + min(FULL_SECONDS, self._retry_after)

    def _max_tokens(self, prompt: int, wish: Wish, welcome: Welcome) -> int:
        limit, min_tokens = wish.max_tokens, wish.stopping.min_tokens
        longest = context_length(welcome)
        pool = "" if longest == welcome.max_model_len else " (as many as its KV cache can hold)"
        requested = limit or 1
        if prompt + requested > longest:
            completion = f" and {limit} for the completion" if limit else ""
            raise ApiError(
                400,
                f"this model's maximum context length is {longest} tokens{pool}, but {prompt + (limit or 0)} were"
                f" requested: {prompt} in the prompt{completion};"
                f" the prompt may have at most {longest - requested}",
                param="max_tokens" if limit and prompt < longest else "prompt",
                code="context_length_exceeded",
            )
        budget = longest - prompt if limit is None else requested
        if min_tokens > budget:
            raise invalid(f"min_tokens must be at most max_tokens, {budget}, got {min_tokens}", "min_tokens")
        return budget

    def _stopping(self, request: CommonFields, welcome: Welcome) -> Stopping:
        stop_ids = request.stop_token_ids or []
        if len(stop_ids) > MAX_STOP_IDS:
            raise invalid(
                f"stop_token_ids may hold at most {MAX_STOP_IDS} ids, got {len(stop_ids)}", "stop_token_ids"
            )
        check_ids(stop_ids, welcome.vocab_size, "stop_token_ids")
        ends = set() if request.ignore_eos else {*welcome.eos_ids, *self.model.eos_ids}
        return Stopping(
            strings=_stop_strings(request.stop),
            ids=frozenset(sorted({*ends, *stop_ids})[:_MAX_WIRE_STOP_IDS]),
            min_tokens=request.min_tokens or 0,
            skip_special_tokens=request.skip_special_tokens is not False,
        )


def _tenant(request: CommonFields) -> str:
    """On whose account the request runs: its tenant's, or its user's. Raises ``ApiError``."""
    if request.tenant is not None and not 1 <= len(request.tenant) <= MAX_TENANT:
        text = f"tenant must have between 1 and {MAX_TENANT} characters, got {len(request.tenant)}"
        raise invalid(text, "tenant", "invalid_value")
    user = request.user or ""
    return request.tenant or (user if len(user) <= MAX_TENANT else hashlib.sha256(user.encode()).hexdigest())


def _slo(request: CommonFields) -> str | int:
    """Which names are classes, the control process knows. Raises ``ApiError``."""
    slo = request.slo
    if isinstance(slo, str) and not 1 <= len(slo) <= MAX_SLO_NAME:
        text = f"slo must be the name of a class, of 1 to {MAX_SLO_NAME} characters, or a number of milliseconds"
        raise invalid(text, "slo", "invalid_value")
    return "" if slo is None else slo


def _salt(request: CommonFields) -> bytes:
    """What a request must have in common with another to share its cached blocks; a user is no tenant here."""
    if request.tenant:
        told = f"{len(request.tenant)}:{request.tenant}{request.cache_salt or ''}"
        return hashlib.sha256(told.encode()).digest()
    return hashlib.sha256(request.cache_salt.encode()).digest() if request.cache_salt else b""


def context_length(welcome: Welcome) -> int:
    """The longest sequence that can be served; 0 while it is not known."""
    return min(welcome.max_model_len, welcome.max_sequence or welcome.max_model_len)


def output_limit(request: CommonFields) -> int | None:
    """The wanted number of output tokens, or None. Raises ``ApiError`` if two fields disagree."""
    limit = request.max_tokens
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        if limit is not None and limit != request.max_completion_tokens:
            raise invalid(
                f"max_tokens ({limit}) and max_completion_tokens ({request.max_completion_tokens}) disagree:"
                " send only one of them",
                "max_completion_tokens",
            )
        return request.max_completion_tokens
    return limit


def check_stream_options(request: CommonFields) -> tuple[bool, bool]:
    """Whether a usage chunk is wanted, and usage in every other chunk too. Raises ``ApiError`` for options without a
    stream."""
    options = request.stream_options
    if options is None:
        return False, False
    if not request.stream:
        raise invalid("stream_options is only allowed when stream is true", "stream_options")
    usage = bool(options.include_usage)
    return usage, usage and bool(options.continuous_usage_stats)


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    strings = [stop] if isinstance(stop, str) else stop or []
    if len(strings) > MAX_STOPS:
        raise invalid(f"stop may hold at most {MAX_STOPS} texts, got {len(strings)}", "stop")
    for index, text in enumerate(strings):
        param = "stop" if isinstance(stop, str) else f"stop[{index}]"
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            raise invalid(f"{param} must have between 1 and {MAX_STOP_CHARS} characters, got {len(text)}", param)
    return tuple(dict.fromkeys(strings))

"""Renders chat templates as transformers does: the same environment, so the same text, so the same tokens.

Templates come with models and are not trusted: they run in Jinja's immutable sandbox, with a bound on the time and on
the size of what they write, checked between the pieces.
"""

import json
import time
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .limits import MAX_TEMPLATE_CHARS, TEMPLATE_SECONDS


class TemplateError(ValueError):
    """The template refuses these messages, or is broken. The text is the template's own where it has one."""


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks what the assistant said; for rendering it means nothing."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


class ChatTemplate:
    """A compiled template. ``render`` may run in any thread."""

    def __init__(self, source: str, specials: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template does not compile: {error}") from None
        self._specials = specials

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: dict[str, Any] | None = None,
    ) -> str:
        """The text of the conversation. Raises ``TemplateError``."""
        context: dict[str, Any] = {
            **self._specials,
            "tools": None,
            "documents": None,
            **(variables or {}),
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        deadline = time.monotonic() + TEMPLATE_SECONDS
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(context):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_TEMPLATE_CHARS:
                    raise TemplateError(f"the chat template wrote more than {MAX_TEMPLATE_CHARS} characters")
                if time.monotonic() > deadline:
                    raise TemplateError(f"the chat template ran for more than {TEMPLATE_SECONDS:g} s")
        except TemplateError:
            raise
        except jinja2.TemplateError as error:
            raise TemplateError(str(error)) from None
        except Exception as error:  # a template can raise whatever Python can
            raise TemplateError(f"the chat template failed: {type(error).__name__}") from None
        return "".join(pieces)

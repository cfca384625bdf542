"""How the control plane's processes log: one line an event on stderr, fields bound by name, colours on a terminal."""

import logging
import os
import sys

import structlog


def configure(level: str) -> None:
    """Set up structlog for this process. ``level`` is a name of ``logging``, in any case."""
    colours = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S.%f", utc=False),
            structlog.processors.format_exc_info,
            structlog.dev.ConsoleRenderer(colors=colours, pad_event_to=0),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )

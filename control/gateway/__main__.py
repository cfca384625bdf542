"""``python -P -m evenflow.control.gateway``: one HTTP gateway, as the launcher starts it."""

import argparse
import asyncio
import os
import socket
import sys
from pathlib import Path

import uvloop
from setproctitle import setproctitle

from ... import __version__
from ..heap import return_large
from ..logs import configure
from ..wire.keys import KeyFault
from ..wire.lifeline import ParentGone, die_with_parent
from ..wire.location import ModelNotFound, locate_model
from .defaults import SamplingDefaults, read_defaults
from .scripted import SCRIPTED, scripted_text_model
from .server import serve
from .tokenizer import TokenizerError, load_text_model


def main(arguments: list[str] | None = None) -> int:
    """The process's exit status: 0 after a drain, 1 if it cannot serve."""
    options = _parser().parse_args(arguments)
    # Encoding runs in our own threads; the library's pool would compete with the workers for the cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    configure(options.log_level)
    setproctitle("evenflow gateway")
    return_large()
    try:
        die_with_parent(options.parent)
        # The port is bound before the model is read: a port that is taken is found at once.
        listener = _listener(options.fd, options.host, options.port)
        defaults = SamplingDefaults()
        if options.model == SCRIPTED:
            name, model = SCRIPTED, scripted_text_model()
        else:
            path = locate_model(options.model)
            name = path.stem if Path(options.model).exists() else options.model
            model = load_text_model(path)
            if options.generation_config and path.is_dir():
                defaults = read_defaults(path)
    except (ModelNotFound, TokenizerError, ParentGone) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: cannot listen on {options.host}:{options.port}: {error.strerror}", file=sys.stderr)
        return 1
    work = serve(
        listener,
        control=options.control,
        keys=options.keys,
        model=model,
        names=options.served_model_name or [name],
        version=__version__,
        drain_seconds=options.drain_timeout,
        defaults=defaults,
    )
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(work)
    except KeyFault as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="evenflow.control.gateway", description="OpenAI-compatible HTTP gateway")
    parser.add_argument("--control", required=True, help="the control process's endpoint for clients")
    parser.add_argument("--keys", metavar="FOLDER", help="server.pub and client.key, for a tcp:// endpoint")
    parser.add_argument("--model", required=True, help="model name, .gguf file or model directory")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 lets the system choose")
    parser.add_argument(
        "--fd", type=int, help="a listening socket that the parent has bound; instead of host and port"
    )
    parser.add_argument("--served-model-name", action="append", help="repeatable; the first is written into answers")
    parser.add_argument("--drain-timeout", type=float, default=30.0, help="seconds for running requests at the end")
    parser.add_argument(
        "--no-generation-config",
        dest="generation_config",
        action="store_false",
        help="leave the model's generation_config.json aside",
    )
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    parser.add_argument("--parent", type=int, help="process id of the parent that starts this")
    return parser


def _listener(fd: int | None, host: str, port: int) -> socket.socket:
    if fd is not None:
        return socket.socket(fileno=fd)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except BaseException:
        listener.close()
        raise
    return listener


if __name__ == "__main__":
    sys.exit(main())

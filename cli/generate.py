"""``evenflow generate``: one completion, from a running server or from one started for it and ended after it.

The answer goes to stdout as it is made; everything else goes to stderr.
"""

import asyncio
import sys

from .errors import UsageError
from .launcher import serve
from .openai_http import Draw, ServerError, connect, first_model, stream
from .options import ServeOptions, check_model, settle


def complete(url: str | None, model: str | None, prompt: str, draw: Draw) -> int:
    """Print the completion. Returns the exit code."""
    try:
        with connect(url) as client:
            body = {"model": model or first_model(client), "prompt": prompt, **draw.fields()}
            for chunk in stream(client, "completions", body):
                for choice in chunk.get("choices") or ():
                    sys.stdout.write(choice.get("text") or "")
                    sys.stdout.flush()
    except ServerError as error:
        print(f"evenflow: {error}", file=sys.stderr)
        return 1
    sys.stdout.write("\n")
    sys.stdout.flush()
    return 0


def run_generate(model: str | None, url: str | None, prompt: str, draw: Draw, stages: int, dtype: str) -> int:
    """Returns the exit code. ``model`` that is a URL means that server."""
    if model is not None and "://" in model:
        model, url = None, model
    if url is not None:
        return complete(url, model, prompt, draw)
    if model is None:
        raise UsageError("generate needs a MODEL to start or the --url of a running server.")
    # Port 0: any number of private servers can run beside each other.
    options, _ = settle(
        ServeOptions(
            model=model,
            stages=stages,
            dtype=dtype,
            port=0,
            max_num_seqs=1,
            drain_timeout=2.0,
            log_level="warning",
        )
    )
    check_model(options)

    async def errand(private_url: str) -> int:
        return await asyncio.to_thread(complete, private_url, None, prompt, draw)

    return serve(options, errand=errand, quiet=True)

"""``python -m evenflow.cli``: the command line without its script."""

from .main import run

run()

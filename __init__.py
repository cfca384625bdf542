"""evenflow: LLM serving that does not stall. See README.md for the folders."""

__version__ = "0.1.0"

"""Reading models: GGUF files, Hugging Face directories, seeded random ones."""

from .locate import open_model
from .source import ModelSource

__all__ = ["ModelSource", "open_model"]

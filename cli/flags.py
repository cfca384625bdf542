"""What several commands have in common: values of flags, and how flags are spelled."""

import enum


class Dtype(enum.StrEnum):
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    INT8 = "int8"
    INT4 = "int4"


class ServedDtype(enum.StrEnum):
    """The same, or that the quickest of them is to be found."""

    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    INT8 = "int8"
    INT4 = "int4"


class Policy(enum.StrEnum):
    """``control.core.bounds.POLICIES``, which would take longer to import."""

    STALL_FREE = "stall-free"
    PREFILL_FIRST = "prefill-first"
    HYBRID = "hybrid"
    REQUEST_LEVEL = "request-level"
    CHUNKED_ONLY = "chunked-only"
    HYBRID_ONLY = "hybrid-only"


class Admission(enum.StrEnum):
    """``control.core.bounds.ADMISSIONS``."""

    FCFS = "fcfs"
    PRIORITY = "priority"
    DEADLINE = "deadline"
    FAIR = "fair"


class LogLevel(enum.StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def _dashes(token: str) -> str:
    return token.replace("_", "-")


SETTINGS = {"token_normalize_func": _dashes, "help_option_names": ["-h", "--help"]}


def env(flag: str) -> str:
    """The environment variable that gives a flag its value."""
    return f"EVENFLOW_{flag.upper()}"

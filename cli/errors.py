"""What a command may raise for its user to read. Here, and not where it is raised: to catch it loads nothing."""


class UsageError(Exception):
    """The command line asks for something that cannot be: one sentence, exit code 2."""


class MeasureFailed(Exception):
    """What was to be chosen by measuring could not be measured: one sentence, exit code 1."""


class MemoryShort(Exception):
    """This machine has not the memory that was asked for: one sentence, exit code 1."""

"""The command line: ``evenflow serve`` with its launcher, and clients (``generate``, ``chat``, ``status``).

Nothing here imports torch or computes anything: the launcher starts the processes that do.
"""

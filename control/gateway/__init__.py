"""The OpenAI-compatible HTTP front: a client of the control process like any other.

A request's way: ``app`` (guard) → ``routes`` → ``fields`` and ``prompts`` (everything that can be checked) →
``service`` (submission) → ``generation`` (tokens to text) → ``answers`` (shapes) → ``sse``.
"""

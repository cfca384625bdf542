"""``evenflow monitor``: what a running server is doing now, from its status and its iteration records."""

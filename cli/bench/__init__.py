"""``evenflow bench``: load on any OpenAI-compatible server, and what its streams felt like."""

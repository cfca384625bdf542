"""The decision core: a deterministic state machine without I/O, clock, threads or randomness.

``Engine.step(event, now)`` returns effects. The same events give the same effects, byte for byte; the server drives
it from sockets, tests and simulators from lists. Read in this order: ``sequence``, ``blocks``, ``lane``, ``policy``,
``stall_free``, ``replica``, ``engine``, ``integrity``.
"""

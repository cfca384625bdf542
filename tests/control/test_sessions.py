"""Clients of the control process: who is connected, and who is gone."""

from evenflow.control.sessions import SILENCE_S, Sessions


def test_clients_are_numbered_and_found_both_ways() -> None:
    sessions = Sessions()
    a, before = sessions.open(b"a", "gateway", 1.0)
    b, _ = sessions.open(b"b", "", 2.0)
    assert before is None and (a.owner, b.owner) == (0, 1)
    assert sessions.by_identity[b"a"] is sessions.by_owner[0] is a and a.name == "gateway"


def test_a_second_hello_is_a_new_client_and_gives_back_the_old_one() -> None:
    sessions = Sessions()
    first, _ = sessions.open(b"a", "x", 1.0)
    first.backlog.append(b"frame")
    second, old = sessions.open(b"a", "x", 2.0)
    assert old is first and second.owner != first.owner and not second.backlog
    assert first.owner not in sessions.by_owner and sessions.by_identity[b"a"] is second


def test_numbers_are_never_used_again() -> None:
    sessions = Sessions()
    numbers: list[int] = []
    for _ in range(5):
        session, _ = sessions.open(b"a", "", 0.0)
        sessions.close(session)
        numbers.append(session.owner)
    assert numbers == [0, 1, 2, 3, 4] and not sessions.by_owner and not sessions.by_identity


def test_closing_twice_is_harmless() -> None:
    sessions = Sessions()
    session, _ = sessions.open(b"a", "", 0.0)
    sessions.close(session)
    sessions.close(session)


def test_silence_is_counted_from_the_last_message() -> None:
    sessions = Sessions()
    a, _ = sessions.open(b"a", "", 0.0)
    b, _ = sessions.open(b"b", "", 0.0)
    b.seen = 5.0
    assert sessions.silent(SILENCE_S) == []
    assert sessions.silent(SILENCE_S + 1) == [a]
    assert sessions.silent(SILENCE_S + 6) == [a, b]

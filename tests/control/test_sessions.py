"""Clients of the control process: who is connected, and who is gone."""

from evenflow.control.sessions import SILENCE_S, Sessions


def test_clients_are_numbered_and_found_both_ways() -> None:
    sessions = Sessions()
    a, before = sessions.open(b"a", "gateway", 1.0)
    b, _ = sessions.open(b"b", "", 2.0)
    assert before == [] and (a.owner, b.owner) == (0, 1)
    assert sessions.by_identity[b"a"] is sessions.by_owner[0] is a and a.name == "gateway"


def test_a_second_hello_is_a_new_client_and_gives_back_the_old_one() -> None:
    sessions = Sessions()
    first, _ = sessions.open(b"a", "x", 1.0)
    second, before = sessions.open(b"a", "x", 2.0)
    assert before == [first] and second.owner != first.owner and second.secret != first.secret
    assert first.owner not in sessions.by_owner and sessions.by_identity[b"a"] is second


def test_a_client_that_dials_again_names_its_session_and_gives_it_back() -> None:
    sessions = Sessions()
    first, _ = sessions.open(b"a", "x", 1.0)
    other, _ = sessions.open(b"b", "y", 1.0)
    second, before = sessions.open(b"c", "x", 2.0, first.secret)
    assert before == [first] and list(sessions.by_owner) == [other.owner, second.owner]
    _, before = sessions.open(b"d", "x", 3.0, first.secret)
    assert before == [], "a secret is good once"


def test_one_session_named_twice_is_ended_once() -> None:
    sessions = Sessions()
    first, _ = sessions.open(b"a", "x", 1.0)
    _, before = sessions.open(b"a", "x", 2.0, first.secret)
    assert before == [first]


def test_secrets_are_not_zero_and_not_to_be_guessed() -> None:
    sessions = Sessions()
    secrets = {sessions.open(bytes([n]), "", 0.0)[0].secret for n in range(100)}
    assert len(secrets) == 100 and 0 not in secrets and max(secrets) > 2**56 and max(secrets) < 2**63


def test_subscribers_are_counted() -> None:
    sessions = Sessions()
    for n in range(3):
        sessions.open(bytes([n]), "", 0.0)[0].interval = n / 2
    assert sessions.subscribers == 2


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

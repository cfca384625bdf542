"""SEC-1 without sockets and in virtual time: whatever comes, the server's books are whole, nobody who is honest is
disturbed, and no exception leaves the handling of a message. Each run follows from its seed."""

import pytest
from evenflow.control import supervision
from hostile_world import Liar, World

MESSAGES = 600


@pytest.mark.parametrize("side", ["worker", "client"])
@pytest.mark.parametrize("seed", range(1))
def test_sec_1_strangers_disturb_nobody(side: str, seed: int) -> None:
    world = World(seed)
    for _ in range(MESSAGES):
        world.nonsense(side)
        world.live()
    world.settle()
    assert world.served > 20 and world.server.bad_frames > MESSAGES // 3
    supervisor = world.server.supervisor
    assert (supervisor.epochs_begun, supervisor.epochs_lost) == (1, 0)


@pytest.mark.parametrize("seed", range(2))
def test_sec_1_a_worker_that_lies_harms_only_what_it_was_given(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # As many epochs as it can end.
    monkeypatch.setattr(supervision, "wait_before_epoch", lambda failures: 0.0)
    world = World(seed, replicas=2)
    # Of what the liar computed nothing can be known: those requests end somehow.
    world._judge = lambda asked, size, count: None
    liar = Liar(world, seed)
    for _ in range(MESSAGES):
        liar.live()
        world.live()
    assert liar.lies > 50 and world.server.supervisor.epochs_lost > 3
    del world._judge
    world.settle()
    served = world.served
    for _ in range(300):
        world.live()
    assert world.served > served + 5

"""The plans of the default settings, byte for byte: a change that is not meant to alter them shows here."""

from hashlib import sha256

import pytest
from evenflow.control.wire import encode
from shadow_server import prompt, scrambled, shadow_server, wanted


def digest_of_plans(seed: int) -> str:
    """Forty requests with shared prompts, stops and aborts on a small pool, their device actions in an order that
    ``seed`` decides; all registrations, plans and ends of that run."""
    server = shadow_server(
        budget=48,
        blocks=60,
        seqs=24,
        max_model_len=400,
        tile=16 if seed & 1 else 0,
        overtakes=8,
        check=False,
    )
    choose = scrambled(seed)
    for key in range(40):
        size = 1 + choose(150)
        tokens = (prompt(choose(size), seed=7) + prompt(size, seed=100 + key))[:size]
        outputs = 1 + choose(90)
        stop = wanted(tokens, outputs)[-1 - choose(outputs)]
        server.submit(key, tokens, outputs, stop_ids=(stop,) if choose(2) else ())
        for _ in range(choose(20)):
            actions = server.actions()
            if actions:
                action, replica, stage = actions[choose(len(actions))]
                action(replica, stage)
        if not choose(8):
            server.abort(choose(key + 1))
    server.run(choose)
    server.assert_idle()
    found = sha256()
    for sent in server.plans:
        for message in [*sent.registers, sent.plan]:
            found.update(encode(message))
        found.update(repr((sent.digest, sent.tokens, sent.decodes, sent.kv_tokens)).encode())
    found.update(repr(sorted(server.clients[0].ended.items())).encode())
    return found.hexdigest()[:16]


@pytest.mark.parametrize(("seed", "digest"), [(1, "995aa86d236f1cc9"), (2, "48c3831be6cfed6e")])
def test_the_default_plans_are_what_they_were(seed: int, digest: str) -> None:
    assert digest_of_plans(seed) == digest

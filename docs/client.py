"""A whole evenflow client, of pyzmq and msgpack alone: complete("ipc:///run/evenflow/clients", [[1, 2, 3]], 16)"""

from array import array

import msgpack
import zmq

HELLO, SUBMIT, PING, WELCOME, TICK, REFUSED, UNKNOWN, MERGED = 32, 33, 37, 48, 49, 50, 52, 53


def owners(replica, slots, keys):
    return {(replica, slot): key for slot, key in zip(array("H", slots), array("Q", keys), strict=True)}


def complete(endpoint, prompts, max_tokens, outputs=None, ended=None, session=0):
    outputs, ended = outputs or [[] for _ in prompts], ended or {}
    expected, owner, unasked = 0, {}, iter([key for key in range(len(prompts)) if key not in ended])
    with zmq.Context.instance().socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(endpoint)
        socket.send(msgpack.packb([HELLO, 1, "minimal", session]))
        while len(ended) < len(prompts):
            tag, *fields = msgpack.unpackb(socket.recv()) if socket.poll(3000) else [UNKNOWN]
            if tag == WELCOME:  # comes once a second, as the ping should
                session = fields[11]
                socket.send(msgpack.packb([PING]))
                for key in unasked:
                    tokens = array("I", prompts[key] + outputs[key]).tobytes()
                    socket.send(msgpack.packb([SUBMIT, key, "", tokens, len(prompts[key]), max_tokens]))
            elif tag == REFUSED:
                raise RuntimeError(f"{fields[1]}: {fields[3]}")
            elif tag == UNKNOWN or fields[0] != expected:  # forgotten, silent, or a message is missing
                return complete(endpoint, prompts, max_tokens, outputs, ended, session)
            elif tag == TICK:
                live, dense, ids, slots, keys, told, replica = fields[2:9]
                owner |= owners(replica, slots, keys)
                for row, slot in enumerate(s for s in range(8 * len(live)) if live[s >> 3] >> (s & 7) & 1):
                    outputs[owner[replica, slot]].append(array("I", ids)[slot if dense else row])
            elif tag == MERGED:
                runs, told, owned = fields[1:4]
                for key, ids in runs:
                    outputs[key] += array("I", ids)
                owner = {place: key for some in owned for place, key in owners(*some).items()}
            if tag in (TICK, MERGED):
                expected += 1
                ended |= {key: reason for key, _, reason, *_ in told if reason != "paused"}
    return outputs

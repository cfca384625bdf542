"""A tiny stand-in for any child of the launcher: ``fake_child.py ROLE NAME LOG MODE [ENDPOINTS or FD …]``.

It writes what happens to it into LOG, one line each: ``NAME event pid [detail]``. Roles: control (answers hellos,
drains on SIGTERM), gateway (answers any HTTP request), worker (waits). Modes are listed in ``main``.
"""

import ctypes
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1


class Log:
    def __init__(self, name: str, path: str) -> None:
        self._name = name
        self._path = path

    def __call__(self, event: str, detail: object = "") -> None:
        line = f"{self._name} {event} {os.getpid()} {detail}\n".encode()
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(fd, line)
        os.close(fd)


def control(log: Log, mode: str, workers_endpoint: str, clients_endpoint: str) -> None:
    import zmq
    from evenflow.control.wire import (
        PROTOCOL_VERSION,
        ClientHello,
        Fatal,
        KillWorker,
        LauncherHello,
        Redial,
        Welcome,
        WorkerExited,
        decode_from_client,
        decode_from_worker,
        encode,
    )

    stopping: list[int] = []
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGTERM, lambda number, _: stopping.append(number))

    context = zmq.Context()
    routers = []
    for endpoint in (workers_endpoint, clients_endpoint):
        router = context.socket(zmq.ROUTER)
        router.linger = 0
        router.bind(endpoint)
        routers.append(router)
    workers, clients = routers
    welcome = Welcome(
        version=PROTOCOL_VERSION,
        instance=os.getpid(),
        model="fake",
        ready=mode != "never-ready",
        max_model_len=64,
        vocab_size=8,
        block_size=16,
        max_sequence=64,
        max_num_seqs=4,
        token_budget=16,
    )
    poller = zmq.Poller()
    for source in (workers, clients, wake_read):
        poller.register(source, zmq.POLLIN)
    known: set[bytes] = set()
    order = Path(log._path).with_name("order")
    log("start")
    while not stopping:
        ready = dict(poller.poll())
        if workers in ready:
            peer, frame = workers.recv_multipart()
            message = decode_from_worker(frame)
            if isinstance(message, LauncherHello):
                known.add(peer)
                log("launcher", message.pid)
                if mode == "fatal":
                    workers.send_multipart([peer, encode(Fatal("the pool has no room for one sequence"))])
            elif peer not in known:
                workers.send_multipart([peer, encode(Redial())])
            elif isinstance(message, WorkerExited):
                log("told", f"{message.replica}.{message.stage} {message.pid} {message.status}")
            elif order.exists():
                replica, stage, pid = (int(word) for word in order.read_text().split())
                order.unlink()
                workers.send_multipart([peer, encode(KillWorker(replica, stage, 0, pid))])
                log("ordered", pid)
        if clients in ready:
            peer, frame = clients.recv_multipart()
            if isinstance(decode_from_client(frame), ClientHello):
                clients.send_multipart([peer, encode(welcome)])
    log("draining")
    if mode == "slow-drain":
        time.sleep(1.0)
    if mode == "long-drain":
        time.sleep(60.0)
    log("end")
    context.destroy(0)


def gateway(log: Log, mode: str, fd: str) -> None:
    def stop(number: int, frame: object) -> None:
        log("end")
        os._exit(0)

    signal.signal(signal.SIGTERM, stop)
    listener = socket.socket(fileno=int(fd))
    listener.setblocking(False)
    log("start")
    while True:
        select.select([listener], [], [])
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            continue
        connection.setblocking(True)
        with connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")


def worker(log: Log, mode: str) -> None:
    def stop(number: int, frame: object) -> None:
        log("end")
        os._exit(0)

    signal.signal(signal.SIGTERM, signal.SIG_IGN if mode == "stubborn" else stop)
    log("start")
    print("loading", flush=True)
    if mode == "fail":
        print("layer 1 is read", file=sys.stderr)
        print("ValueError: tensor blk.1.attn_q is corrupt", file=sys.stderr)
        sys.exit(1)
    if mode == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        signal.pause()


def main() -> None:
    role, name, path, mode, *rest = sys.argv[1:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    roles = {"control": control, "gateway": gateway, "worker": worker}
    roles[role](Log(name, path), mode, *rest)


if __name__ == "__main__":
    main()

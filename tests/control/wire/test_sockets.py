"""The socket factory: limits, forks, stale files, and an end that does not wait."""

import socket as system_socket
import subprocess
import sys
import textwrap

import pytest
import zmq
from evenflow.control.wire.fields import MAX_MESSAGE_BYTES
from evenflow.control.wire.sockets import (
    EndpointError,
    ForkedContext,
    WireContext,
    bind_router,
    bound_endpoint,
    close_context,
    dial_dealer,
    ipc_endpoint,
    new_context,
)


class KeepingContext(WireContext):
    """Keeps its sockets, so that they live until the end of a test."""

    kept: tuple = ()

    def socket(self, *args, **kwargs):
        made = super().socket(*args, **kwargs)
        self.kept = (*self.kept, made)
        return made


@pytest.fixture
def context():
    made = KeepingContext()
    yield made
    close_context(made)


def readable(socket, timeout_ms: int = 5000) -> bool:
    return bool(socket.poll(timeout_ms))


def run_python(code: str, *arguments: str, timeout: float = 30) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def test_every_socket_has_the_limits(context, tmp_path):
    endpoint = ipc_endpoint(tmp_path / "s")
    sockets = [
        bind_router(context, endpoint, hwm=7),
        dial_dealer(context, endpoint, hwm=7),
    ]
    for socket in sockets:
        assert socket.getsockopt(zmq.LINGER) == 0
        assert socket.getsockopt(zmq.MAXMSGSIZE) == MAX_MESSAGE_BYTES
        assert 0 < socket.getsockopt(zmq.SNDHWM) < 10_000
        assert 0 < socket.getsockopt(zmq.RCVHWM) < 10_000
        assert socket.getsockopt(zmq.IPV6) == 0


def test_zmq_1_a_process_with_unsent_messages_exits_at_once(tmp_path):
    """ZMQ-1: unsent messages for a peer that is not there do not keep a process alive."""
    code = """
        import sys
        from evenflow.control.wire.sockets import close_context, dial_dealer, new_context
        context = new_context()
        absent = dial_dealer(context, sys.argv[1])
        closed_port = dial_dealer(context, "tcp://127.0.0.1:1")
        for socket in (absent, closed_port):
            for _ in range(100):
                socket.send(b"x" * 10_000)
        if sys.argv[2] == "close":
            close_context(context)
        print("sent")
    """
    for how in ("close", "leave"):
        done = run_python(code, ipc_endpoint(tmp_path / "nobody"), how, timeout=20)
        assert (done.returncode, done.stdout.strip()) == (0, "sent"), done.stderr


def test_zmq_1_a_server_exits_while_a_client_does_not_read(context, tmp_path):
    """ZMQ-1: a stuck client does not keep a server alive, and is not dropped in silence: its queue is full."""
    code = """
        import sys, zmq
        from evenflow.control.wire.sockets import bind_router, close_context, new_context
        context = new_context()
        router = bind_router(context, sys.argv[1], hwm=10)
        peer = router.recv_multipart()[0]
        sent = 0
        try:
            while True:
                router.send_multipart([peer, b"x" * 100_000], zmq.NOBLOCK)
                sent += 1
        except zmq.Again:
            print("full", sent < 10_000)
        close_context(context)
    """
    endpoint = ipc_endpoint(tmp_path / "server")
    stuck = dial_dealer(context, endpoint, hwm=10)
    stuck.send(b"hello")
    done = run_python(code, endpoint)
    assert (done.returncode, done.stdout.strip()) == (0, "full True"), done.stderr


def test_sending_to_a_peer_that_is_not_there_is_an_error(context, tmp_path):
    router = bind_router(context, ipc_endpoint(tmp_path / "s"))
    with pytest.raises(zmq.ZMQError) as error:
        router.send_multipart([b"nobody", b"x"], zmq.NOBLOCK)
    assert error.value.errno == zmq.EHOSTUNREACH


def test_a_peer_that_dials_again_under_its_name_replaces_itself(context, tmp_path):
    endpoint = ipc_endpoint(tmp_path / "s")
    router = bind_router(context, endpoint)
    first = dial_dealer(context, endpoint, identity=b"w")
    first.send(b"1")
    assert router.recv_multipart() == [b"w", b"1"]
    second = dial_dealer(context, endpoint, identity=b"w")
    second.send(b"2")
    assert router.recv_multipart() == [b"w", b"2"]
    router.send_multipart([b"w", b"hello"])
    assert readable(second)
    assert not readable(first, 0)


def test_a_dealer_dials_before_and_after_its_server_lives(context, tmp_path):
    endpoint = ipc_endpoint(tmp_path / "s")
    dealer = dial_dealer(context, endpoint, identity=b"w")
    dealer.send(b"early")
    for life in range(3):
        home = new_context()
        router = bind_router(home, endpoint)
        if life:
            # One sent before the loss was noticed is lost with the connection: signs of life are repeated.
            while not readable(router, 100):
                dealer.send(b"again")
        assert readable(router)
        assert router.recv_multipart()[1] == (b"again" if life else b"early")
        router.send_multipart([b"w", b"life"])
        assert readable(dealer)
        assert dealer.recv() == b"life"
        close_context(home)


def test_sec_1_a_frame_that_is_too_large_costs_its_sender_the_connection(context, tmp_path):
    """SEC-1: a claim of 2 GB is not believed; others are served as before."""
    path = tmp_path / "s"
    router = bind_router(context, ipc_endpoint(path))
    with system_socket.socket(system_socket.AF_UNIX) as raw:
        raw.connect(str(path))
        raw.settimeout(10)
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
        raw.sendall(greeting)
        ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
        raw.sendall(b"\x04" + bytes([len(ready)]) + ready)
        raw.sendall(b"\x02" + (2 << 30).to_bytes(8, "big") + b"x" * 100)
        received = b"more"
        while received:
            try:
                received = raw.recv(4096)
            except ConnectionResetError:
                break
    good = dial_dealer(context, ipc_endpoint(path))
    good.send(b"hello")
    assert readable(router)
    assert router.recv_multipart()[1] == b"hello"


def test_zmq_4_a_context_refuses_to_work_in_a_forked_child(context, tmp_path):
    """ZMQ-4: the child of a fork gets an exception, not silence; the parent goes on."""
    code = """
        import os, sys, warnings
        from evenflow.control.wire.sockets import ForkedContext, bind_router, dial_dealer, new_context
        warnings.simplefilter("ignore")
        context = new_context()
        router = bind_router(context, sys.argv[1])
        child = os.fork()
        if child == 0:
            try:
                dial_dealer(context, sys.argv[1])
            except ForkedContext as error:
                os._exit(7 if str(os.getppid()) in str(error) else 8)
            os._exit(9)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        # A name for it: a socket that is collected closes at once and takes what it has not yet sent along.
        dealer = dial_dealer(context, sys.argv[1])
        dealer.send(b"still here")
        print(router.recv_multipart()[1].decode())
    """
    done = run_python(code, ipc_endpoint(tmp_path / "s"))
    assert done.stdout.split("\n")[:2] == ["7", "still here"], done.stderr
    assert issubclass(ForkedContext, RuntimeError)


def test_zmq_5_eight_servers_at_the_same_moment_do_not_collide(context):
    """ZMQ-5: the system chooses each port as it is bound."""
    for _ in range(20):
        routers = [bind_router(context, "tcp://127.0.0.1:0", insecure=True) for _ in range(8)]
        endpoints = [bound_endpoint(router) for router in routers]
        assert len(set(endpoints)) == 8
        for router, endpoint in zip(routers, endpoints, strict=True):
            dealer = dial_dealer(context, endpoint)
            dealer.send(endpoint.encode())
            assert router.recv_multipart()[1] == endpoint.encode()
            dealer.close(0)
            router.close(0)


def test_zmq_5_a_stale_socket_file_is_replaced(context, tmp_path):
    """ZMQ-5: a killed process leaves its socket file; the next one starts nevertheless."""
    path = tmp_path / "s"
    code = """
        import os, sys
        from evenflow.control.wire.sockets import bind_router, new_context
        router = bind_router(new_context(), sys.argv[1])
        os.kill(os.getpid(), 9)
    """
    assert run_python(code, ipc_endpoint(path)).returncode == -9
    assert path.is_socket()
    router = bind_router(context, ipc_endpoint(path))
    dealer = dial_dealer(context, ipc_endpoint(path))
    dealer.send(b"hello")
    assert router.recv_multipart()[1] == b"hello"
    assert path.stat().st_mode & 0o777 == 0o600


def test_zmq_5_a_living_server_is_not_replaced(context, tmp_path):
    """ZMQ-5: ZeroMQ itself would take the name away from it."""
    endpoint = ipc_endpoint(tmp_path / "s")
    first = bind_router(context, endpoint)
    with pytest.raises(EndpointError, match="another process listens"):
        bind_router(context, endpoint)
    dealer = dial_dealer(context, endpoint)
    dealer.send(b"hello")
    assert first.recv_multipart()[1] == b"hello"


def test_a_file_that_is_no_socket_is_left_alone(context, tmp_path):
    path = tmp_path / "s"
    path.write_text("mine")
    with pytest.raises(EndpointError, match="no socket"):
        bind_router(context, ipc_endpoint(path))
    assert path.read_text() == "mine"


def test_a_path_that_is_too_long_is_named(context, tmp_path):
    path = "/" + "d" * 60 + "/" + "f" * 46
    with pytest.raises(EndpointError, match="108 bytes, a socket's path at most 107"):
        ipc_endpoint(path)
    with pytest.raises(EndpointError, match="at most 107"):
        dial_dealer(context, f"ipc://{path}")
    assert ipc_endpoint(path[:-1]).endswith("f")
    with pytest.raises(EndpointError, match="absolute"):
        bind_router(context, "ipc://here")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", "*", "192.0.2.1", "example.org"])
def test_sec_2_a_tcp_bind_without_keys_is_refused(context, host):
    """SEC-2: on the loopback too, where every user of the machine could dial."""
    with pytest.raises(EndpointError, match=r"without keys.*--insecure"):
        bind_router(context, f"tcp://{host}:0")


def test_errors_of_endpoints_close_their_sockets():
    made = new_context()
    for endpoint in ("tcp://127.0.0.1:99999", "ipc:///no/such/directory/s", "udp://x"):
        with pytest.raises(OSError, match="cannot bind"):
            bind_router(made, endpoint)
    with pytest.raises(EndpointError, match="cannot dial"):
        dial_dealer(made, "nonsense")
    # An open socket would keep this from returning.
    made.term()
    assert made.closed

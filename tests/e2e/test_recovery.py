"""Issue's line 3, FT-1: whatever dies while eight seeded streams run, their text is that of an undisturbed run.

Each kind of failure meets a real model and the scripted one, whose ids betray any wrong block, plan or position.
"""

import signal
from collections.abc import Iterator

import pytest
from live_server import HttpStream, LiveServer, Watch, live, wait_for

STREAMS = 8
#: Issue: recovery takes at most this long from detection, on a machine that has the time to load a model in it.
RECOVERY_S = 10.0
_WORDS = (
    "river",
    "ran",
    "past",
    "an",
    "old",
    "mill",
    "where",
    "seven",
    "friends",
    "told",
    "of",
    "ships",
    "and",
    "stars",
)
#: Model, options, and tokens of each stream: the scripted worker makes them faster.
KINDS = {
    "scripted": (("scripted", "--step-ms", "20"), 150),
    "smollm2": (("smollm2-135m", "--dtype", "float32"), 48),
}


def _prompt(index: int) -> str:
    count = 50 + 30 * index
    return " ".join(_WORDS[(index * 5 + i * (index + 3)) % len(_WORDS)] for i in range(count))


class Scene:
    """A server, the streams that are always the same, and what they say if nothing happens."""

    def __init__(self, server: LiveServer, model: str, tokens: int) -> None:
        self.server = server
        self.model = model
        self.tokens = tokens
        self.undisturbed = self.texts(self.start())
        assert len(set(self.undisturbed)) == STREAMS

    def start(self) -> list[HttpStream]:
        return [
            HttpStream(
                self.server.url,
                prompt=_prompt(index),
                max_tokens=self.tokens,
                ignore_eos=True,
                temperature=0.7 + 0.05 * index,
                top_p=0.95 if index % 2 else 1.0,
                seed=1000 + index,
            )
            for index in range(STREAMS)
        ]

    def started(self, pieces: int = 6) -> list[HttpStream]:
        """Streams that are all well under way."""
        streams = self.start()
        wait_for(lambda: all(len(stream.pieces) >= pieces for stream in streams), why="the first tokens")
        return streams

    def texts(self, streams: list[HttpStream]) -> list[str]:
        found = [stream.finish() for stream in streams]
        for stream in streams:
            assert stream.reasons == ["length"]
            assert stream.usage is not None and stream.usage["completion_tokens"] == self.tokens
        return found

    def finished(self, what: str, streams: list[HttpStream], harmed: float, noticed: str) -> None:
        """All texts are as ever. ``noticed``: the log line that says that the failure was detected."""
        assert self.texts(streams) == self.undisturbed
        detected = self.server.said(noticed, harmed)
        assert detected is not None, self.server.log
        up = self.server.said("replica up", detected)
        back = detected if up is None else up
        first = min(at for stream in streams for at, _ in stream.pieces if at > back)
        print(
            f"{self.model}, {what}: detected after {detected - harmed:.2f} s, up again {back - detected:.2f} s later,"
            f" next token {first - back:.2f} s after that"
        )
        # Loading a model again takes what it takes on cores that other tests use, too: it is printed.
        assert first - back <= RECOVERY_S


@pytest.fixture(scope="module", params=[pytest.param(kind, marks=pytest.mark.xdist_group(kind)) for kind in KINDS])
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    """Two stages."""
    arguments, tokens = KINDS[request.param]
    with live(*arguments, "--stages", "2", "--hang-timeout", "2") as server:
        yield Scene(server, request.param, tokens)


@pytest.mark.parametrize("role", ["worker 0.0", "worker 0.1"])
def test_killed_worker(scene: Scene, role: str) -> None:
    with Watch(scene.server.url) as watch:
        watch.settled()
        streams = scene.started()
        harmed = scene.server.kill(role)
        scene.finished(f"kill -9 of {role}", streams, harmed, "epoch over")
        watch.settled()
    # The only replica was away for a while; gateway and control were not.
    assert watch.ready(harmed) == {200, 503}
    assert watch.health() == {200}


def test_stopped_worker(scene: Scene) -> None:
    with Watch(scene.server.url) as watch:
        watch.settled()
        streams = scene.started()
        harmed = scene.server.kill("worker 0.1", signal.SIGSTOP)
        scene.finished("kill -STOP of worker 0.1", streams, harmed, "worker hangs")
        watch.settled()
    assert watch.ready(harmed) == {200, 503}
    assert watch.health() == {200}


def test_killed_control(scene: Scene) -> None:
    workers = [scene.server.find(f"worker 0.{stage}").pid for stage in range(2)]
    with Watch(scene.server.url) as watch:
        watch.settled()
        streams = scene.started()
        harmed = scene.server.kill("control")
        scene.finished("kill -9 of control", streams, harmed, "control (process")
        watch.settled()
    # The workers kept their weights: they are the same processes.
    assert [scene.server.find(f"worker 0.{stage}").pid for stage in range(2)] == workers


def test_stopped_control(scene: Scene) -> None:
    """Nobody hears control: 503 within five seconds. Once it goes on, so do the streams."""
    with Watch(scene.server.url) as watch:
        watch.settled()
        streams = scene.started()
        harmed = scene.server.kill("control", signal.SIGSTOP)
        try:
            wait_for(lambda: 503 in watch.health(harmed), 30.0, "/health 503")
            first = next(at for at, health, _ in watch.seen if at > harmed and health == 503)
            print(f"{scene.model}: /health is 503 {first - harmed:.2f} s after control was stopped")
            assert 503 in watch.ready(harmed)
        finally:
            scene.server.kill("control", signal.SIGCONT)
        assert scene.texts(streams) == scene.undisturbed
        watch.settled()


def test_killed_gateway(scene: Scene) -> None:
    """Its streams are lost with it, and seen to be; the port is kept and the next gateway serves."""
    streams = scene.started()
    harmed = scene.server.kill("gateway")
    for stream in streams:
        stream.join(60.0)
        assert not stream.done and stream.broken is not None
    assert scene.texts(scene.start()) == scene.undisturbed
    assert scene.server.said("gateway (process", harmed) is not None
    # What the dead one had asked for is not computed any further.
    wait_for(lambda: scene.server.metrics().get("evenflow_num_requests_running") == 0, why="an idle server")


def test_everything_is_gone_in_the_end(scene: Scene) -> None:
    """Last in the module: no process is left ten seconds after the server's end, nor a file."""
    assert len(scene.server.members()) == 4
    assert scene.server.stop() == 0


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.xdist_group(kind)) for kind in KINDS])
def test_one_of_two_replicas(kind: str) -> None:
    """The other one takes its requests over: ``/ready`` says 200 throughout."""
    arguments, tokens = KINDS[kind]
    with live(*arguments, "--replicas", "2", "--hang-timeout", "2") as server:
        scene = Scene(server, kind, tokens)
        with Watch(server.url) as watch:
            watch.settled()
            streams = scene.started()
            harmed = server.kill("worker 1.0")
            scene.finished("kill -9 of one of two replicas", streams, harmed, "epoch over")
            wait_for(lambda: server.metrics().get("evenflow_replicas_up") == 2, why="the return of the replica")
        assert watch.health() == {200} and watch.ready() == {200}


@pytest.mark.xdist_group("scripted")
def test_killed_launcher() -> None:
    with live("scripted", "--stages", "2") as server:
        stream = HttpStream(server.url, prompt="a", max_tokens=4000, ignore_eos=True)
        wait_for(lambda: stream.pieces)
        server.process.kill()
        server.process.wait(10.0)
        wait_for(lambda: not server.members(), 10.0, "the end of all processes")
        stream.join(10.0)
        assert not stream.done


@pytest.mark.xdist_group("scripted")
def test_poison_request() -> None:
    """A request that kills its worker each time fails at the third death; the others finish unchanged."""
    poison = 49_100
    arguments = ("scripted", "--step-ms", "20", "--stages", "2")
    with live(*arguments, f"--worker-arg=--crash-on={poison}") as server:
        scene = Scene(server, "scripted", 80)
        streams = scene.started()
        bad = HttpStream(server.url, prompt=[5, 6, poison, 7], max_tokens=20)
        bad.join(120.0)
        assert bad.error is not None and not bad.done
        print(f"the poison request's error: {bad.error}")
        assert scene.texts(streams) == scene.undisturbed
        # It is forgotten: the server goes on.
        wait_for(lambda: server.get("/ready") == 200)
        assert server.post("/v1/completions", prompt="a", max_tokens=5).status_code == 200
        assert server.log.count("epoch over") == 3

"""Workers, replicas and epochs. Sans-I/O: messages and times go in, actions come out; the server carries them out.

Workers dial in. When all stages of a replica have, an epoch starts; when one is lost, restarted, hangs or is out of
step, the epoch is over: the others drop their slots at the next start and keep their weights. The life of a replica:

    down --every stage said hello--> starting --every stage started--> up
      ^                                  |                              |
      +---- a worker is lost, new, silent or contradicts the plans -----+
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import structlog

from .bubbles import BubbleAccount
from .core.bounds import worker_tokens
from .core.events import Event, Limits, ReplicaLost, ReplicaUp, Returned, SendPlan
from .limits import settle_limits
from .patience import patience
from .places import CLAIM_S, Claim, Layout, host_name, misfit, no_such_place
from .profiles import expectation, slowest_profile
from .vacancies import Vacancies
from .wire import (
    PROTOCOL_VERSION,
    Fatal,
    FromWorker,
    Heartbeat,
    Hello,
    KillWorker,
    LauncherHello,
    Probe,
    Quit,
    Redial,
    Result,
    Resync,
    Sample,
    Start,
    Started,
    Terms,
    WorkerExited,
)

log = structlog.get_logger("evenflow.control")

#: A worker that was told to start an epoch answers within this many seconds, or is killed.
START_TIMEOUT_S = 60.0
#: An epoch that lasted so many seconds makes up for those before it that did not.
FORGIVEN_S = 60.0
#: The longest wait between an epoch that living workers could not go on with and the next.
LONGEST_WAIT_S = 10.0
#: Blocks of a replica: more than any memory has, and a bound on what their books may cost here.
MAX_BLOCKS = 1 << 22
#: Iterations that count as recent.
RECENT = 64


@dataclass(frozen=True, slots=True)
class Post:
    """Send ``message`` to the peer named ``identity``."""

    identity: bytes
    message: Start | Heartbeat | Redial | Quit | KillWorker | Fatal | Terms


@dataclass(frozen=True, slots=True)
class Occur:
    """Give ``event`` to the core."""

    event: Event


Action = Post | Occur


@dataclass(slots=True)
class Peer:
    """A worker that has dialled in."""

    identity: bytes
    hello: Hello
    seen: float
    started: bool = False
    #: Last step of this epoch that it has returned.
    step: int = -1
    profile: list[Sample] = field(default_factory=list[Sample])  #: what it measured of itself


@dataclass(slots=True)
class Site:
    """What is known of one replica's workers."""

    index: int
    bubbles: BubbleAccount
    state: Literal["down", "starting", "up"] = "down"
    epoch: int = 0
    num_blocks: int = 0
    num_slots: int = 0
    since: float = 0.0
    peers: dict[tuple[int, int], Peer] = field(default_factory=dict[tuple[int, int], Peer])
    #: (step, tokens) of plans whose result of the last stage has not come.
    inflight: deque[tuple[int, int]] = field(default_factory=deque[tuple[int, int]])
    #: When the oldest of them could begin.
    waiting_since: float = 0.0
    #: Seconds and tokens of iterations.
    recent: deque[tuple[float, int]] = field(default_factory=lambda: deque[tuple[float, int]](maxlen=RECENT))
    starved_us: int = 0  #: longest wait of an earlier stage for a plan since the last stage's newest result
    digests: dict[int, int] = field(default_factory=dict[int, int])
    #: Epochs in a row that ended although all workers lived, and when the next may begin.
    failures: int = 0
    not_before: float = float("-inf")


def wait_before_epoch(failures: int) -> float:
    """Seconds before the next epoch after ``failures`` in a row that living workers could not go on with."""
    return 0.0 if failures <= 1 else min(LONGEST_WAIT_S, 0.5 * 2 ** min(failures - 2, 10))


class Supervisor:
    """``wanted`` are the limits asked for; the effective ones, in ``limits``, are known when a replica first came
    up. ``epoch`` must be larger than any that earlier lives of the control process used."""

    def __init__(
        self,
        wanted: Limits,
        *,
        replicas: int,
        stages: int,
        links: str,
        instance: int,
        epoch: int,
        hang_timeout: float = 15.0,
        model_len: int | None = None,
        external: Iterable[int] = (),
    ) -> None:
        self.wanted = wanted
        self.limits: Limits | None = None
        self.model: Hello | None = None  #: the first hello: what model is served
        self.stages = stages
        self.sites = [Site(i, BubbleAccount(stages)) for i in range(replicas)]
        self.epoch = epoch
        self.restarts = 0
        self.epochs_begun = 0  #: in which a replica came up
        self.epochs_lost = 0
        self.audit_failures = 0
        self.refused = 0  #: peers that wanted to be what they cannot be here
        self.hang_timeout = hang_timeout
        self._links = links
        self._instance = instance
        self._model_len = model_len
        self._layout = Layout(replicas, stages, frozenset(external))
        self._claims: dict[tuple[int, int, int], Claim] = {}
        self._workers: dict[bytes, tuple[Site, Peer]] = {}
        self._launcher: bytes | None = None
        self._complained = float("-inf")
        self._vacancies = Vacancies()

    # ---- messages --------------------------------------------------------------------------------------------

    def take(self, identity: bytes, message: FromWorker, now: float) -> list[Action]:
        """A message from the workers' socket."""
        known = self._workers.get(identity)
        if known is not None:
            site, peer = known
            peer.seen = now
            if type(message) is Result:
                return self._result(site, peer, message, now)
            if isinstance(message, Started):
                return self._started(site, peer, message, now)
            if isinstance(message, Resync):
                if site.state == "down" or message.epoch not in (0, site.epoch):
                    return []
                log.warning("worker out of step", replica=site.index, stage=peer.hello.stage, reason=message.reason)
                if site.state == "starting":
                    # It refuses the start itself, and would the next: only a new process may help, with back-off.
                    return self._kill(site, peer, "it refuses to start an epoch", Quit(message.reason, refused=True))
                return self._begin_again(site, "a worker is out of step", now)
        if isinstance(message, Hello):
            return self._hello(identity, message, now)
        if isinstance(message, Probe):
            return self._probed(identity, message, now)
        if isinstance(message, LauncherHello):
            return self._launched(identity, message)
        if isinstance(message, WorkerExited) and identity == self._launcher:
            return self._exited(message, now)
        waits = any(claim.identity == identity for claim in self._claims.values())
        if known is None and identity != self._launcher and not waits:
            return [Post(identity, Redial(self._instance))]
        return []

    def _launched(self, identity: bytes, hello: LauncherHello) -> list[Action]:
        if hello.version != PROTOCOL_VERSION:
            self.refused += 1
            problem = f"protocol version {hello.version}, this control process speaks {PROTOCOL_VERSION}"
            return [Post(identity, Fatal(problem))]
        if self._launcher is not None and self._launcher != identity:
            # Whoever is there keeps the part. If it is gone, sending to it tells, and the other will ask again.
            self.refused += 1
            return [Post(self._launcher, Heartbeat(0, self._instance))]
        self._launcher = identity
        return []

    def _hello(self, identity: bytes, hello: Hello, now: float) -> list[Action]:
        site = self.sites[hello.replica] if hello.replica < len(self.sites) else None
        problem = no_such_place(hello, self._layout)
        if problem is None and site is not None:
            mates = [peer.hello for peer in site.peers.values()]
            problem = misfit(hello, self._example(hello), self.limits, mates)
        if problem is not None or site is None:
            return self._refuse(identity, hello, problem or "", now)
        place = (hello.stage, hello.rank)
        old = site.peers.get(place)
        if old is not None and old.identity != identity:
            return self._claim(site, old, identity, hello, now)
        actions = self._lose(site, "a worker dialled in anew") if site.state != "down" else []
        if old is not None:
            self._workers.pop(old.identity, None)
        peer = site.peers[place] = Peer(identity, hello, now)
        self._workers[identity] = (site, peer)
        log.info(
            "worker dialled in",
            replica=hello.replica,
            stage=hello.stage,
            rank=hello.rank,
            pid=hello.pid,
            host=host_name(hello.host),
        )
        return [*actions, *self._assemble(site, now)]

    def _refuse(self, identity: bytes, asked: Hello | Probe, problem: str, now: float) -> list[Action]:
        self.refused += 1
        if now - self._complained >= 1.0:
            self._complained = now
            log.error("worker refused", replica=asked.replica, stage=asked.stage, reason=problem, so_far=self.refused)
        return [Post(identity, Quit(problem, refused=True))]

    def _claim(self, site: Site, old: Peer, identity: bytes, hello: Hello, now: float) -> list[Action]:
        """Somebody wants a place that is taken: it is held off until it is certain that the other one lives."""
        place = (site.index, hello.stage, hello.rank)
        claim = self._claims.get(place)
        if claim is not None and claim.identity != identity:
            return self._refuse(identity, hello, "another worker waits for this place already", now)
        self._claims[place] = Claim(identity, hello, now if claim is None else claim.since)
        # If it is gone, sending to it tells.
        return [Post(old.identity, Heartbeat(site.epoch, self._instance))]

    def _settle_claims(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for place, claim in list(self._claims.items()):
            replica, *rest = place
            old = self.sites[replica].peers.get((rest[0], rest[1]))
            if old is None:
                del self._claims[place]
                actions += self._hello(claim.identity, claim.hello, now)
            elif now - claim.since >= CLAIM_S:
                del self._claims[place]
                where = f"process {old.hello.pid} on {host_name(old.hello.host)}"
                problem = f"replica {replica}, stage {rest[0]} is taken by {where}"
                actions += self._refuse(claim.identity, claim.hello, problem, now)
        return actions

    def _probed(self, identity: bytes, probe: Probe, now: float) -> list[Action]:
        problem = no_such_place(probe, self._layout)
        if problem is not None:
            return self._refuse(identity, probe, problem, now)
        wanted = self.wanted
        layout, model = self._layout, "" if self.model is None else self.model.model
        if self.limits is not None:
            budget = self.limits.token_budget
        else:
            budget = worker_tokens(wanted.policy, wanted.token_budget, self._model_len, wanted.max_num_seqs)
        terms = Terms(layout.replicas, self.stages, wanted.block_size, budget, wanted.max_num_seqs, model)
        return [Post(identity, terms)]

    def _example(self, hello: Hello) -> Hello | None:
        """What all must agree with: before the first epoch the workers that are there must agree with each other."""
        return self.model or next(
            (
                peer.hello
                for site in self.sites
                for place, peer in site.peers.items()
                if (site.index, *place) != (hello.replica, hello.stage, hello.rank)
            ),
            None,
        )

    def _assemble(self, site: Site, now: float) -> list[Action]:
        """Begin an epoch if every stage is there."""
        if site.state != "down" or len(site.peers) < self.stages or now < site.not_before:
            return []
        hellos = [peer.hello for peer in site.peers.values()]
        num_blocks = min(MAX_BLOCKS, *(hello.num_blocks for hello in hellos))
        limits = self.limits
        if limits is None:
            self.model = hellos[0]
            limits = self.limits = settle_limits(self.wanted, hellos, num_blocks, self.stages, self._model_len)
        self.epoch += 1
        site.state, site.epoch, site.since = "starting", self.epoch, now
        site.inflight.clear()
        site.digests.clear()
        site.bubbles.begin()
        admitted = min(limits.max_num_seqs, limits.token_budget * self.stages)
        slots = min(admitted + max(8, admitted // 2), *(hello.num_slots for hello in hellos), 65_000)
        start = Start(
            site.epoch,
            self.stages,
            num_blocks,
            limits.block_size,
            slots,
            limits.token_budget,
            limits.max_model_len,
            # Workers started by hand may be on another host: they make a directory of their own there.
            f"{self._links}.r{site.index}" if site.index in self._layout.external else self._links,
        )
        for peer in site.peers.values():
            peer.started, peer.step = False, -1
        log.info("epoch starts", replica=site.index, epoch=site.epoch, blocks=num_blocks, slots=slots)
        site.num_blocks, site.num_slots = num_blocks, slots
        return [Post(peer.identity, start) for peer in site.peers.values()]

    def _started(self, site: Site, peer: Peer, message: Started, now: float) -> list[Action]:
        if site.state != "starting" or message.epoch != site.epoch:
            return []
        peer.started = True
        peer.profile = message.profile
        if not all(p.started for p in site.peers.values()):
            return []
        site.state, site.since, site.waiting_since = "up", now, now
        self.epochs_begun += 1
        log.info("replica up", replica=site.index, epoch=site.epoch)
        profile = slowest_profile([p.profile for p in site.peers.values()])
        if self.limits is not None and (expected := expectation(profile, self.limits, self.stages)) is not None:
            log.info("predicted worst gap", replica=site.index, **expected)
        return [Occur(ReplicaUp(site.index, site.epoch, self.stages, site.num_blocks, site.num_slots, profile))]

    def _result(self, site: Site, peer: Peer, result: Result, now: float) -> list[Action]:
        if site.state != "up" or result.epoch != site.epoch:
            return []
        stage = peer.hello.stage
        peer.step = result.step
        if not peer.hello.rank:
            site.bubbles.returned(stage, result)
        if result.digest is not None and site.digests.get(result.step) not in (None, result.digest):
            self.audit_failures += 1
            # Nothing that this process says can be believed: it is fenced, and its place is for a fresh one.
            log.error("a worker's tables differ from control's", replica=site.index, stage=stage, step=result.step)
            return self._kill(site, peer, "the audit failed", what="worker is wrong")
        if stage != self.stages - 1:
            site.starved_us = max(site.starved_us, result.starved_us)
            return []
        inflight = site.inflight
        if inflight and inflight[0][0] == result.step:
            tokens = inflight.popleft()[1]
            site.digests.pop(result.step, None)
            site.recent.append((now - site.waiting_since, tokens))
            site.waiting_since = now
        starved_us, site.starved_us = site.starved_us, 0
        return [Occur(Returned(site.index, result, starved_us))]

    def _exited(self, message: WorkerExited, now: float) -> list[Action]:
        log.error(
            "worker process ended",
            replica=message.replica,
            stage=message.stage,
            pid=message.pid,
            status=message.status,
        )
        self.restarts += 1
        if message.replica >= len(self.sites):
            return []
        site = self.sites[message.replica]
        peer = site.peers.get((message.stage, message.rank))
        if peer is None or peer.hello.pid != message.pid:
            return []
        return self._drop(site, peer, "a worker process ended")

    # ---- time ------------------------------------------------------------------------------------------------

    def sent(self, plan: SendPlan, now: float) -> None:
        """A plan is on its way to every rank."""
        site = self.sites[plan.replica]
        step = plan.plan.step
        if not site.inflight:
            site.waiting_since = now
        site.bubbles.planned(plan)
        site.inflight.append((step, plan.tokens))
        if plan.digest is not None:
            site.digests[step] = plan.digest

    def place_of(self, identity: bytes) -> tuple[int, int] | None:
        """Replica and stage of a worker's first rank."""
        known = self._workers.get(identity)
        return None if known is None or known[1].hello.rank else (known[0].index, known[1].hello.stage)

    def identities(self, replica: int) -> Iterable[bytes]:
        """Every rank of a replica."""
        return [peer.identity for peer in self.sites[replica].peers.values()]

    def tick(self, now: float) -> list[Action]:
        """To be called about four times a second: finds what hangs, tells all that control lives."""
        actions = self._settle_claims(now)
        if self._launcher is not None:
            taken = {(site.index, *place) for site in self.sites for place in site.peers}
            actions += [Post(self._launcher, order) for order in self._vacancies.orders(self._layout, taken, now)]
        for site in self.sites:
            if site.state == "up" and site.inflight:
                limit = max(self.hang_timeout, patience(site.recent, site.inflight[0][1]))
                if now - site.waiting_since > limit:
                    step = site.inflight[0][0]
                    stuck = next(p for _, p in sorted(site.peers.items()) if p.step < step)
                    actions += self._kill(site, stuck, f"no result of step {step} for {limit:.1f} s")
            elif site.state == "down":
                actions += self._assemble(site, now)
            elif site.state == "starting" and now - site.since > START_TIMEOUT_S:
                for peer in [p for p in site.peers.values() if not p.started]:
                    actions += self._kill(site, peer, f"epoch not started after {START_TIMEOUT_S:.0f} s")
        return actions

    def beat(self) -> list[Action]:
        """Heartbeats for every worker: once a second."""
        return [
            Post(peer.identity, Heartbeat(site.epoch, self._instance))
            for site in self.sites
            for peer in site.peers.values()
        ]

    def gone(self, identity: bytes, now: float) -> list[Action]:
        """The socket says that this peer is not connected."""
        if identity == self._launcher:
            self._launcher = None
        known = self._workers.get(identity)
        return self._drop(*known, "its connection is gone") if known is not None else []

    def _kill(
        self, site: Site, peer: Peer, reason: str, word: Quit | None = None, what: str = "worker hangs"
    ) -> list[Action]:
        """End a worker's part, and its process if it is the launcher's. ``word`` is for one that is not: without it,
        it may come back."""
        hello = peer.hello
        log.error(what, replica=site.index, stage=hello.stage, pid=hello.pid, reason=reason)
        actions = self._drop(site, peer, reason)
        if site.index in self._layout.external:
            return [*actions, Post(peer.identity, word)] if word is not None else actions
        if self._launcher is not None:
            actions.append(Post(self._launcher, KillWorker(hello.replica, hello.stage, hello.rank, hello.pid)))
        return actions

    def _drop(self, site: Site, peer: Peer, reason: str) -> list[Action]:
        site.peers.pop((peer.hello.stage, peer.hello.rank), None)
        self._workers.pop(peer.identity, None)
        return self._lose(site, reason)

    def _lose(self, site: Site, reason: str) -> list[Action]:
        was, site.state = site.state, "down"
        site.inflight.clear()
        site.recent.clear()
        if was == "down":
            return []
        log.warning("epoch over", replica=site.index, epoch=site.epoch, reason=reason)
        if was != "up":
            return []
        self.epochs_lost += 1
        return [Occur(ReplicaLost(site.index))]

    def out_of_step(self, replica: int, reason: str, now: float) -> list[Action]:
        """The core found a result that contradicts the plans."""
        return self._begin_again(self.sites[replica], reason, now)

    def _begin_again(self, site: Site, reason: str, now: float) -> list[Action]:
        """End an epoch although all workers are there; the next begins at once, or later if that happens again and
        again."""
        if now - site.since > FORGIVEN_S:
            site.failures = 0
        site.failures += 1
        site.not_before = now + wait_before_epoch(site.failures)
        return [*self._lose(site, reason), *self._assemble(site, now)]

    @property
    def ready(self) -> bool:
        """Whether at least one replica serves."""
        return any(site.state == "up" for site in self.sites)

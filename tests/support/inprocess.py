"""A whole server in one process, without sockets, clock or threads: the real core and fan-out, real executors on
loopback links, and a client that believes only what the ticks say. Tests choose every interleaving."""

from array import array
from collections import deque
from collections.abc import Callable, Iterator
from math import inf

from evenflow.control.core.engine import Engine
from evenflow.control.core.events import (
    Aborted,
    Delivered,
    Event,
    Limits,
    OutOfStep,
    Rejected,
    ReplicaLost,
    ReplicaUp,
    Returned,
    SendPlan,
    Submitted,
    Wake,
)
from evenflow.control.core.integrity import check_integrity
from evenflow.control.fanout import Fanout
from evenflow.control.wire import (
    NO_SLOT,
    Merged,
    Result,
    Sampling,
    Start,
    Submit,
    Tick,
    TokenLogprobs,
    decode_to_client,
    encode,
)
from evenflow.dataplane.batch import Runner
from evenflow.dataplane.executor import Limits as WorkerLimits
from evenflow.dataplane.simulated.loopback import LoopbackReplica
from evenflow.dataplane.simulated.made_up import Row


def u32(tokens: list[int] | tuple[int, ...]) -> bytes:
    return array("I", tokens).tobytes()


class StreamClient:
    """Follows one client's ticks; fails on whatever the protocol forbids."""

    def __init__(self) -> None:
        self.slots: dict[tuple[int, int], int] = {}
        self.tokens: dict[int, list[int]] = {}
        self.ended: dict[int, tuple[str, str]] = {}
        self.cached: dict[int, int] = {}
        #: By key and index of the token in its sequence.
        self.logprobs: dict[int, dict[int, Row]] = {}
        self.sequence = 0

    def take(self, tick: Tick) -> None:
        assert tick.sequence == self.sequence, "a tick is missing"
        self.sequence += 1
        for slot, key in zip(array("H", tick.start_slots), array("Q", tick.start_keys), strict=True):
            assert (tick.replica, slot) not in self.slots, f"slot {slot} has an owner"
            assert key not in self.slots.values(), f"{key} owns a slot already"
            self.slots[tick.replica, slot] = key
        live = [s for s in range(8 * len(tick.live)) if tick.live[s >> 3] >> (s & 7) & 1]
        ids = array("I", tick.ids)
        for i, slot in enumerate(live):
            key = self.slots[tick.replica, slot]
            assert key not in self.ended, f"{key} gets a token after its end"
            self.tokens[key].append(ids[slot] if tick.dense else ids[i])
        self._learn(tick.logprobs)
        for end in tick.ends:
            if end.slot != NO_SLOT:
                assert self.slots.pop((tick.replica, end.slot)) == end.key
            if end.reason != "paused":
                assert end.key not in self.ended, f"{end.key} ends twice"
                self.ended[end.key] = (end.reason, end.message)
                self.cached[end.key] = end.cached_tokens
                assert end.output_tokens == len(self.tokens[end.key])

    def take_merged(self, merged: Merged) -> None:
        assert merged.sequence == self.sequence, "a tick is missing"
        self.sequence += 1
        for run in merged.runs:
            assert run.key not in self.ended and run.ids, f"{run.key} gets a token after its end"
            self.tokens[run.key] += array("I", run.ids)
        self._learn(merged.logprobs)
        for end in merged.ends:
            assert end.slot == NO_SLOT and end.reason != "paused"
            assert end.key not in self.ended, f"{end.key} ends twice"
            self.ended[end.key] = (end.reason, end.message)
            self.cached[end.key] = end.cached_tokens
            assert end.output_tokens == len(self.tokens[end.key])
        self.slots = {
            (owned.replica, slot): key
            for owned in merged.owned
            for slot, key in zip(array("H", owned.slots), array("Q", owned.keys), strict=True)
        }
        assert len(set(self.slots.values())) == len(self.slots) and not set(self.slots.values()) & set(self.ended)

    def _learn(self, entries: list[TokenLogprobs]) -> None:
        for told in entries:
            assert told.key not in self.ended, f"{told.key} gets log-probabilities after its end"
            values, ranks = array("f", told.values), array("I", told.ranks)
            width = len(told.top_ids) // len(told.values)
            top = list(zip(array("I", told.top_ids), array("f", told.top_values), strict=True))
            known = self.logprobs.setdefault(told.key, {})
            for i, (value, rank) in enumerate(zip(values, ranks, strict=True)):
                assert told.start + i not in known, f"{told.key} gets token {told.start + i} twice"
                known[told.start + i] = (value, rank, tuple(top[i * width : (i + 1) * width]))


class InProcess:
    """``make_runner(stage, stages)`` builds the runner of a stage; the pool has its blocks, or ``num_blocks``."""

    def __init__(
        self,
        limits: Limits,
        make_runner: Callable[[int, int], Runner],
        *,
        stages: int = 1,
        replicas: int = 1,
        num_slots: int = 64,
        num_blocks: int | None = None,
        check: bool = True,
        up: bool = True,
    ) -> None:
        self.limits, self.stages, self.num_slots, self.check = limits, stages, num_slots, check
        self.num_blocks = num_blocks
        self.engine = Engine(limits)
        self.decide = self.engine.step  #: for a test that watches what goes in and comes out
        self.fanout = Fanout()
        self.clients: dict[int, StreamClient] = {}
        self.rejected: list[Rejected] = []
        self.replicas = [
            LoopbackReplica(
                [make_runner(stage, stages) for stage in range(stages)],
                WorkerLimits(max_tokens=limits.token_budget, num_slots=num_slots),
            )
            for _ in range(replicas)
        ]
        self.results: list[deque[Result]] = [deque() for _ in range(replicas)]
        self.digests: dict[tuple[int, int, int], int | None] = {}
        self.epochs = [0] * replicas
        self.plans: list[SendPlan] = []
        self.now = 0.0
        self.pace = 1.0  #: seconds from one event to the next
        self.wake_at = inf  #: when the engine wants to be stepped, as it last said
        if up:
            for replica in range(replicas):
                self.bring_up(replica)

    # ---- events

    def bring_up(self, replica: int) -> None:
        self.epochs[replica] += 1
        hello = self.replicas[replica].hellos(replica)[0]
        start = Start(
            self.epochs[replica],
            self.stages,
            self.num_blocks or hello.num_blocks,
            self.limits.block_size,
            self.num_slots,
            self.limits.token_budget,
            self.limits.max_model_len,
            "",
        )
        self.replicas[replica].start(start)
        self.results[replica].clear()
        self.step(ReplicaUp(replica, start.epoch, self.stages, start.num_blocks, start.num_slots))

    def crash(self, replica: int, keep_results: bool = False) -> None:
        """The replica's workers die: what they have not returned is lost."""
        if not keep_results:
            self.results[replica].clear()
        self.step(ReplicaLost(replica))

    def submit(
        self,
        key: int,
        tokens: list[int],
        max_tokens: int,
        *,
        owner: int = 0,
        received: list[int] | None = None,
        sampling: Sampling | None = None,
        stop_ids: tuple[int, ...] = (),
        min_tokens: int = 0,
        salt: bytes = b"",
        leader: int | None = None,
        tenant: str = "",
        priority: int = 0,
        deadline_ms: int = 0,
    ) -> None:
        received = received or []
        client = self.clients.setdefault(owner, StreamClient())
        client.tokens[key] = list(received)
        message = Submit(
            key,
            f"r{key}",
            u32([*tokens, *received]),
            len(tokens),
            max_tokens,
            sampling or Sampling(),
            stop_ids,
            min_tokens,
            salt,
            leader,
            tenant,
            priority,
            deadline_ms,
        )
        self.step(Submitted(owner, message))

    def abort(self, key: int, owner: int = 0) -> None:
        self.step(Aborted(owner, key))

    def step(self, event: Event) -> None:
        self.now += self.pace
        for effect in self.decide(event, self.now):
            if isinstance(effect, SendPlan):
                self.plans.append(effect)
                plan = effect.plan
                chunk_tokens = array("I", plan.chunk_tokens)
                decodes = sum(byte.bit_count() for byte in plan.decodes)
                assert 0 < decodes + sum(chunk_tokens) == effect.tokens <= self.limits.token_budget
                self.digests[effect.replica, plan.epoch, plan.step] = effect.digest
                self.replicas[effect.replica].submit([encode(m) for m in [*effect.registers, plan]])
            elif isinstance(effect, Delivered):
                self.tell(effect)
            elif isinstance(effect, OutOfStep):
                raise AssertionError(effect.reason)
            elif isinstance(effect, Wake):
                self.wake_at = effect.at
            else:
                self.rejected.append(effect)
        if self.check:
            check_integrity(self.engine)

    def tell(self, delivered: Delivered) -> None:
        """Give every client its tick."""
        for owner, tick in self.fanout.ticks(delivered):
            message = decode_to_client(encode(tick))
            assert isinstance(message, Tick)
            self.clients[owner].take(message)

    # ---- the device side

    def actions(self) -> list[tuple[Callable[..., None], int, int]]:
        """What could happen next on the device side, in a fixed order."""
        found: list[tuple[Callable[..., None], int, int]] = []
        for index, replica in enumerate(self.replicas):
            if index not in self.engine.replicas:
                continue
            for stage in range(self.stages):
                if replica.can_run(stage):
                    found.append((self._run_stage, index, stage))
            if replica._ids:
                found.append((self._deliver, index, 0))
            if self.results[index]:
                found.append((self._return, index, 0))
        return found

    def walk(self, seed: int, steps: int) -> Iterator[None]:
        """Do up to ``steps`` of ``actions``, each chosen by ``seed``; yields after each."""
        for i in range(steps):
            actions = self.actions()
            if not actions:
                return
            seed = seed * 1103515245 + 12345 + i & 0x7FFFFFFF
            action, replica, stage = actions[(seed >> 8) % len(actions)]
            action(replica, stage)
            yield

    def _run_stage(self, replica: int, stage: int) -> None:
        result = self.replicas[replica].run_stage(stage)
        assert result is not None
        expected = self.digests[replica, result.epoch, result.step]
        assert result.digest == expected, f"step {result.step}: stage {stage} audits differently"
        if stage == self.stages - 1:
            self.results[replica].append(result)

    def _deliver(self, replica: int, _: int) -> None:
        assert self.replicas[replica].deliver_ids()

    def _return(self, replica: int, _: int) -> None:
        result = self.results[replica].popleft()
        self.step(Returned(replica, result))

    def run(self, choose: Callable[[int], int] = lambda n: n - 1, most: int = 1_000_000) -> int:
        """Let the device side go on until nothing is left to do; returns the number of actions."""
        for count in range(most):
            actions = self.actions()
            if not actions:
                return count
            action, replica, stage = actions[choose(len(actions))]
            action(replica, stage)
        raise AssertionError("the server does not come to rest")

    # ---- what came out

    def tokens(self, key: int, owner: int = 0) -> list[int]:
        return self.clients[owner].tokens[key]

    def reason(self, key: int, owner: int = 0) -> str | None:
        ended = self.clients[owner].ended.get(key)
        return None if ended is None else ended[0]

    def logprobs_of(self, key: int, owner: int = 0) -> dict[int, Row]:
        """By index of the token in the sequence."""
        return self.clients[owner].logprobs.get(key, {})

    def assert_idle(self) -> None:
        """Nothing runs, nothing leaks."""
        check_integrity(self.engine)
        assert not self.engine.requests and not self.engine.homeless and not self.engine.parked
        for replica in self.engine.replicas.values():
            assert not replica.running and not replica.waiting and not replica.settling and not replica.inflight
            assert replica.pool.available == replica.pool.num_blocks
        for client in self.clients.values():
            assert not client.slots and set(client.tokens) == set(client.ended)

"""The engine: ``step(event, now)`` takes one event and returns what must be done about it.

It keeps every unfinished request, routes requests over replicas (``routing``), and lets each replica plan ahead. A
replica that is lost gives its requests to the others, or keeps them waiting here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

from ..wire import Submit
from .biases import bias_problem
from .bounds import WHOLE_PROMPTS
from .budget import Budget
from .drain import Drain
from .events import (
    Aborted,
    Delivered,
    Due,
    Effect,
    Ended,
    Event,
    Limits,
    Moved,
    OwnerLost,
    Rejected,
    ReplicaLost,
    ReplicaUp,
    Returned,
    Submitted,
    Wake,
)
from .expiry import Expiry
from .migration import Migration
from .orders import assign, make_ledger
from .replica import Replica
from .routing import route
from .sequence import Phase, Sequence
from .slo import set_targets, slo_problem
from .timing import Features
from .vocabulary import too_large

#: A request that was running at this many deaths of a worker is failed.
FATAL_DEATHS = 3
#: Counted over the engine's life: requests, and the sums over replicas that are gone.
_COUNTERS = ("requests", "finished", "preemptions", "iterations", "cache_queries", "cache_hits")


class Engine:
    """All decisions of a control process. Deterministic: state and events are all that counts."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        #: The longest sequence that the limits allow. What is computed whole must fit an iteration.
        self._longest = limits.max_model_len
        if limits.policy in WHOLE_PROMPTS and limits.token_budget < limits.max_model_len:
            self._longest = limits.token_budget + 1
        self.max_sequence = 0  #: longest sequence that any replica has had room for; 0 before the first came up
        self.replicas: dict[int, Replica] = {}
        self.requests: dict[int, dict[int, Sequence]] = {}  #: unfinished, by client and key
        self.homeless: list[Sequence] = []  #: no replica is up; by admission order
        self.parked: dict[Sequence, list[Sequence]] = {}  #: by leader: those that wait for its prompt's blocks
        self.counters: dict[str, int] = dict.fromkeys(_COUNTERS, 0)
        self.ledger = make_ledger(limits)
        self.expiry = Expiry()
        self.drain = Drain()
        self._departed = (0, 0)  #: requests, and their tokens, that left the queues of replicas that are gone
        self.now = 0.0  #: the time of the present step
        self._wake = inf  #: when the last ``Wake`` asked to be stepped
        self._order = 0
        self._homes: dict[Sequence, Replica] = {}
        self._budgets: dict[int, Budget] = {}  #: by replica, if they are in seconds
        self._ready: list[Replica] = []  #: the replicas, ready to be walked through
        self._entrances: list[Replica] = []  #: those that take requests
        #: Of sequences from the replicas that compute prompts to those that decode, if they are not the same.
        self.migration = Migration() if limits.prefill_replicas else None
        self._handlers: dict[type[Any], Callable[[Any, list[Effect]], None]] = {
            Returned: self._returned,
            Submitted: self._submitted,
            Aborted: self._aborted,
            OwnerLost: self._owner_lost,
            ReplicaUp: self._replica_up,
            ReplicaLost: self._replica_lost,
            Due: self._due,
            Moved: self._moved,
        }

    def step(self, event: Event, now: float) -> list[Effect]:
        """Take ``event``, which happened at ``now`` (seconds, any origin). Effects are in the order to be done:
        plans before tokens."""
        late: list[Effect] = []
        self.now = now
        if now >= self.drain.due:
            self.drain.sample(now, *self._departures())
        self._handlers[type(event)](event, late)
        effects: list[Effect] = []
        if self.expiry.next() <= now:
            self._expire(late)
        if self.parked:
            self._unpark(late)
        if self.migration is not None:
            self._migrate(self.migration, effects)
        wake = self._plan(now, effects, late)
        while self.migration is not None and self._migrate(self.migration, effects):
            # What was preempted goes to another replica, which may have been passed already.
            wake = self._plan(now, effects, late)
        expiry = self.expiry.next()
        if expiry < wake:
            wake = expiry
        if wake != self._wake:
            self._wake = wake
            if wake < inf:
                late.append(Wake(wake))
        for effect in late:
            if type(effect) is Delivered and effect.ends:
                self._forget(effect)
        effects += late
        return effects

    def _plan(self, now: float, effects: list[Effect], late: list[Effect]) -> float:
        """Let all replicas plan ahead; returns when the first of them wants to be asked again."""
        wake = inf
        for replica in self._ready:
            if len(replica.inflight) <= replica.stages:
                while (plan := replica.plan_next(now)) is not None:
                    effects.append(plan)
            if replica.ended:
                late.append(replica.take_ended())
            if replica.due < wake:
                wake = replica.due
        return wake

    def _due(self, event: Due, effects: list[Effect]) -> None:
        self._wake = inf

    # ---- clients ---------------------------------------------------------------------------------------------

    def _submitted(self, event: Submitted, effects: list[Effect]) -> None:
        submit, owner, limits = event.submit, event.owner, self.limits
        most = self._longest
        if 0 < self.max_sequence < most:
            most = self.max_sequence
        problem = self._problem(owner, submit, most)
        if problem is not None:
            code, field, message = problem
            retry = self._retry_ms(field, submit.prompt_len) if code == "overloaded" else 0
            effects.append(Rejected(owner, submit.key, code, field, message, retry))
            return
        wanted = submit.prompt_len + submit.max_tokens if submit.max_tokens else most
        seq = Sequence(self._order, owner, submit, wanted if wanted < most else most)
        if 0 < self.limits.prefix_limit < submit.prompt_len:
            # So wide that no client's own salt can be the same.
            seq.salt += submit.prompt_len.to_bytes(65, "little")
        self._order += 1
        if limits.slo is not None:
            set_targets(seq, submit, limits.slo, self.now)
        self.counters["requests"] += 1
        if len(seq.tokens) >> 2 >= seq.max_len:
            # A continuation that had all its tokens when control was lost.
            seq.phase = Phase.DONE
            self.counters["finished"] += 1
            effects.append(Delivered(-1, 0, b"", b"", owner, [], [Ended(seq, -1, "length")]))
            return
        seq.arrived = self.now
        assign(seq, submit, self.limits, self.ledger)
        if submit.deadline_ms:
            self.expiry.watch(seq, self.now + submit.deadline_ms / 1000, "deadline")
        if self.limits.queue_timeout and seq.known == seq.prompt_len:
            self.expiry.watch(seq, self.now + self.limits.queue_timeout, "queue_timeout")
        owned = self.requests.get(owner)
        if owned is None:
            self.requests[owner] = {submit.key: seq}
        else:
            owned[submit.key] = seq
            if submit.leader is not None and self._park(seq, owned.get(submit.leader)):
                return
        self._route(seq)

    def _problem(self, owner: int, submit: Submit, most: int) -> tuple[str, str, str] | None:
        """Why a submission is refused: code, field and message. ``most`` is the longest sequence served."""
        limits = self.limits
        size, prompt = len(submit.tokens), submit.prompt_len
        known = size >> 2
        if size & 3 or not known:
            return "invalid", "tokens", f"tokens must be a buffer of at least one u32, not of {size} bytes"
        if not 1 <= prompt <= known:
            return "invalid", "prompt_len", f"prompt_len must be from 1 to {known}, not {prompt}"
        owned = self.requests.get(owner)
        if owned is not None and submit.key in owned:
            return "invalid", "key", f"request {submit.key} is still running"
        sampling = submit.sampling
        if sampling.bias_ids or sampling.bias_values:
            problem = bias_problem(sampling, limits.vocab_size)
            if problem is not None:
                return problem
        problem = slo_problem(submit, limits.slo)
        if problem is not None:
            return problem
        if submit.priority and limits.admission != "priority":
            text = f"priority must be 0 where requests are admitted by {limits.admission}, not {submit.priority}"
            return "invalid", "priority", text
        if prompt >= most:
            where = "the model's length"
            if most < self._longest:
                where = "the block pool"
            elif most < limits.max_model_len:
                where = f"an iteration, which policy {limits.policy} computes a prompt in,"
            text = f"the prompt has {prompt} tokens; with at least one of output {where} allows {most - 1}"
            return "too_long", "tokens", text
        if limits.vocab_size < 1 << 32 and (largest := too_large(submit.tokens, limits.vocab_size)) is not None:
            text = f"token ids must be from 0 to {limits.vocab_size - 1}, not {largest}"
            return "invalid", "tokens", text
        if known > prompt:
            # A continuation was taken on before: it is not refused for being many.
            return None
        waiting, tokens = self._queued()
        if waiting >= limits.max_queued:
            return "overloaded", "max_queued", f"{waiting} requests are waiting, the most that may"
        if tokens and tokens + prompt > limits.max_queued_tokens:
            return (
                "overloaded",
                "max_queued_tokens",
                f"{tokens} tokens are waiting; with this request's more than may",
            )
        return None

    def _queued(self) -> tuple[int, int]:
        """Requests that wait, and known tokens of those that wait on a replica."""
        waiting, tokens = len(self.homeless), 0
        for followers in self.parked.values():
            waiting += len(followers)
        for replica in self._ready:
            waiting += len(replica.waiting)
            tokens += replica.waiting.tokens
        return waiting, tokens

    def _departures(self) -> tuple[int, int]:
        """Requests, and their tokens, that have left the queues so far."""
        requests, tokens = self._departed
        for replica in self._ready:
            requests += replica.waiting.departures
            tokens += replica.waiting.departed_tokens
        return requests, tokens

    def _retry_ms(self, field: str, prompt: int) -> int:
        """When a request of ``prompt`` tokens that ``field`` kept out may come again."""
        waiting, tokens = self._queued()
        excess = waiting + 1 - self.limits.max_queued
        excess_tokens = tokens + prompt - self.limits.max_queued_tokens if field == "max_queued_tokens" else 0
        return self.drain.retry_ms(self.now, *self._departures(), excess, excess_tokens)

    def retry_ms(self) -> int:
        """What a request that the queue has no place for is told at present: milliseconds."""
        return self.drain.retry_ms(
            self.now, *self._departures(), max(1, self._queued()[0] + 1 - self.limits.max_queued), 0
        )

    def _expire(self, effects: list[Effect]) -> None:
        """End what has run out of time, wherever it is."""
        for seq, reason in self.expiry.due(self.now):
            waited = self.now - seq.arrived
            if reason == "deadline":
                message = f"the request did not end by its deadline, {waited:.1f} s after it came"
            else:
                message = f"the request waited {waited:.1f} s without being begun, the most that any may"
            self._end(seq, reason, effects, message)

    def _aborted(self, event: Aborted, effects: list[Effect]) -> None:
        seq = self.requests.get(event.owner, {}).get(event.key)
        if seq is not None:
            self._end(seq, "abort", effects)

    def _owner_lost(self, event: OwnerLost, effects: list[Effect]) -> None:
        for seq in list(self.requests.get(event.owner, {}).values()):
            self._end(seq, "abort", effects)

    def _end(self, seq: Sequence, reason: str, effects: list[Effect], message: str = "") -> None:
        slot = seq.slot if seq.phase not in (Phase.WAITING, Phase.DONE) else -1
        home = self._homes.pop(seq, None)
        if home is None:
            for followers in self.parked.values():
                if seq in followers:
                    followers.remove(seq)
                    break
            else:
                if self.migration is None or not self.migration.remove(seq):
                    self.homeless.remove(seq)
            seq.phase = Phase.DONE
        else:
            home.remove(seq)
        ended = Ended(seq, slot, reason, message)
        effects.append(Delivered(-1 if home is None else home.index, 0, b"", b"", seq.owner, [], [ended]))

    def _forget(self, delivered: Delivered) -> None:
        """Drop what has finished from the books."""
        for ended in delivered.ends:
            if ended.reason != "paused":
                seq = ended.seq
                if seq.account is not None and self.ledger is not None:
                    self.ledger.close(seq)
                owned = self.requests.get(seq.owner)
                if owned is not None and owned.pop(seq.key, None) is not None:
                    self.counters["finished"] += 1
                    if not owned:
                        del self.requests[seq.owner]
                self._homes.pop(seq, None)

    # ---- siblings --------------------------------------------------------------------------------------------

    def _park(self, seq: Sequence, leader: Sequence | None) -> bool:
        """Let ``seq`` wait for its leader, if there are full blocks that it can share. It is in no queue then."""
        size = 4 * seq.prompt_len
        if (
            leader is None
            or leader is seq
            or not self.limits.prefix_caching
            or seq.prompt_len <= self.limits.block_size
            or seq.sampling.prompt_logprobs >= 0
            or (leader.prompt_len, leader.salt) != (seq.prompt_len, seq.salt)
            or leader.tokens[:size] != seq.tokens[:size]
        ):
            return False
        self.parked.setdefault(leader, []).append(seq)
        return True

    def _unpark(self, effects: list[Effect]) -> None:
        """Queue those whose leader's prompt is planned, or no longer will be. Its blocks are in the prefix cache of
        its replica, which attracts them."""
        for leader, followers in list(self.parked.items()):
            if leader.phase < Phase.DECODE:
                continue
            del self.parked[leader]
            ends = [ended for seq in followers if (ended := self._rehome(seq)) is not None]
            if ends:
                effects.append(Delivered(-1, 0, b"", b"", -1, [], ends))

    # ---- replicas --------------------------------------------------------------------------------------------

    def _route(self, seq: Sequence) -> None:
        home = route(self._entrances, seq)
        if home is None:
            self.homeless.append(seq)
            self.homeless.sort(key=lambda s: s.order)
        else:
            self._homes[seq] = home

    def _replica_up(self, event: ReplicaUp, effects: list[Effect]) -> None:
        if event.replica in self.replicas:
            self._replica_lost(ReplicaLost(event.replica), effects)
        limits = self.limits
        budget = self._budget(event) if limits.slo is not None else None
        blocks, slots = event.num_blocks, event.num_slots
        prompts = event.replica < limits.prefill_replicas
        if prompts:
            limits = replace(limits, token_budget=limits.prefill_tokens)
        replica = Replica(event.replica, event.epoch, event.stages, blocks, slots, limits, budget, self.ledger)
        replica.role.computes_prompts = prompts
        replica.role.only_decodes = limits.prefill_replicas > 0 and not prompts
        if self.ledger is not None:
            self.ledger.pool_tokens += event.num_blocks * limits.block_size
        self.replicas[event.replica] = replica
        self._walk()
        # The last token's KV is never written.
        room = min(event.num_blocks * limits.block_size + 1, self._longest)
        self.max_sequence = room if not self.max_sequence else min(self.max_sequence, room)
        homeless, self.homeless = self.homeless, []
        ends = [ended for seq in homeless if (ended := self._rehome(seq)) is not None]
        if ends:
            effects.append(Delivered(event.replica, 0, b"", b"", -1, [], ends))

    def _walk(self) -> None:
        """The replicas have changed."""
        self._ready = list(self.replicas.values())
        self._entrances = [replica for replica in self._ready if not replica.role.only_decodes]

    # ---- from replicas that compute prompts to those that decode ---------------------------------------------

    def _migrate(self, migration: Migration, effects: list[Effect]) -> bool:
        """Find another replica for what cannot go on where it was, and begin the moves that can begin; whether there
        was any such."""
        found = False
        for replica in self._ready:
            role = replica.role
            if role.handed:
                found = True
                handed, role.handed = role.handed, []
                for seq in handed:
                    if seq.phase is Phase.DONE:
                        continue
                    self._homes.pop(seq, None)
                    if role.computes_prompts:
                        seq.phase = Phase.WAITING
                        migration.leaving.append((seq, replica))
                    else:
                        self._route(seq)
        if migration.leaving:
            effects += migration.begin(self._ready)
        return found

    def _moved(self, event: Moved, effects: list[Effect]) -> None:
        migration = self.migration
        if migration is None:
            return
        target = migration.target(event.move)
        seq = migration.arrived(event.move)
        if seq is not None and target is not None:
            self._homes[seq] = target

    def _budget(self, event: ReplicaUp) -> Budget:
        limits, budget = self.limits, self._budgets.get(event.replica)
        assert limits.slo is not None
        if budget is None:
            budget = Budget(limits.slo, event.stages, limits.token_budget, limits.tile)
            self._budgets[event.replica] = budget
        budget.begin_epoch()
        budget.fit(
            [(Features(s.prefill, s.attention, s.decodes, s.kv_tokens), s.took_us / 1e6) for s in event.profile]
        )
        return budget

    def _rehome(self, seq: Sequence) -> Ended | None:
        """Route ``seq``, which has no replica, within the room that is left; or its end, if it has outgrown that."""
        most = self.max_sequence
        if seq.max_len > most > 0:
            if seq.known >= most:
                seq.phase = Phase.DONE
                message = f"the block pool holds {most} tokens of a sequence, this one has {seq.known}"
                return Ended(seq, -1, "error", message)
            seq.max_len = most
        self._route(seq)
        return None

    def _replica_lost(self, event: ReplicaLost, effects: list[Effect]) -> None:
        replica = self.replicas.pop(event.replica, None)
        if replica is None:
            return
        self._walk()
        counters = self.counters
        queue = replica.waiting
        self._departed = (self._departed[0] + queue.departures, self._departed[1] + queue.departed_tokens)
        if self.ledger is not None:
            self.ledger.pool_tokens -= replica.pool.num_blocks * self.limits.block_size
        counters["preemptions"] += replica.preemptions
        counters["iterations"] += replica.step
        counters["cache_queries"] += replica.cache_queries
        counters["cache_hits"] += replica.cache_hits
        unfinished, ends = replica.evacuate()
        delivered = Delivered(replica.index, replica.step, b"", b"", -1, [], ends)
        if self.migration is not None:
            for seq in self.migration.lost(replica):
                if (ended := self._rehome(seq)) is not None:
                    delivered.ends.append(ended)
        for seq in unfinished:
            del self._homes[seq]
            if seq.deaths >= FATAL_DEATHS:
                seq.phase = Phase.DONE
                message = f"a worker died {seq.deaths} times while this request was running, the last time alone"
                delivered.ends.append(Ended(seq, -1, "error", message))
            elif (ended := self._rehome(seq)) is not None:
                delivered.ends.append(ended)
        effects.append(delivered)

    def _returned(self, event: Returned, effects: list[Effect]) -> None:
        replica = self.replicas.get(event.replica)
        if replica is None:
            return
        effect = replica.receive(event.result, self.now, event.starved_us)
        if effect is not None:
            effects.append(effect)

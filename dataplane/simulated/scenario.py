"""What is simulated: a model on devices under a policy, and from that the limits of the core and the replicas."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ...control.core.bounds import POLICIES, WHOLE_PROMPTS, iteration_tokens
from ...control.core.events import Limits
from ...control.core.slo import Slo
from ...control.wire import Sample
from .cost import DeviceCost, Work
from .device import Device, Host
from .moving import KvLink
from .profiled import Profile, ProfiledCost, load_description, shape_for
from .refusal import CannotSimulate
from .shape import ModelShape, load_shape
from .world import ReplicaModel

_SEVERAL = re.compile(r"([1-9]\d{0,3})x(.+)")


@dataclass(frozen=True, slots=True)
class Scenario:
    """``ranks`` × ``stages`` × ``replicas`` devices serve ``shape``.

    ``length``: of the longest sequence, 0 for the model's. ``host``: what of it counts, by name or one's own.
    ``utilisation``: the share of the memory for weights and KV cache. ``blocks``: of the pool, 0 for what the memory
    holds. ``kv_link``: gigabytes a second of KV blocks from each replica, and to it. The rest is as in ``Limits``;
    ``share`` is 0, as in the paper's Algorithm 3.
    """

    shape: ModelShape
    device: Device | Profile
    ranks: int = 1
    stages: int = 1
    replicas: int = 1
    policy: str = "stall-free"
    token_budget: int = 512
    max_num_seqs: int = 128
    length: int = 0
    block_size: int = 16
    tile: int = 0
    share: float = 0.0
    prefix_caching: bool = False
    await_prefix: bool = False
    slo: Slo | None = None
    admission: str = "fcfs"
    host: str | Host = "eager"
    speed: float = 1.0
    utilisation: float = 0.85
    blocks: int = 0
    prefill_replicas: int = 0
    prefill_tokens: int = 2048
    kv_link: float = 300.0

    def cost(self) -> DeviceCost | ProfiledCost:
        """Raises ``CannotSimulate`` if the model cannot run so."""
        if isinstance(self.device, Profile):
            if self.ranks * self.stages != 1:
                raise CannotSimulate(
                    f"{self.device.title} was measured as one stage of one rank: it says nothing of {self.stages}"
                    f" stages of {self.ranks}"
                )
            return ProfiledCost(self.device, self.speed)
        return DeviceCost(
            self.device, self.shape, ranks=self.ranks, stages=self.stages, host=self.host, speed=self.speed
        )

    def limits(self) -> Limits:
        """The core's. Raises ``CannotSimulate`` for a value that cannot be."""
        if self.policy not in POLICIES:
            raise CannotSimulate(f"there is no policy {self.policy!r}: it is one of {', '.join(POLICIES)}")
        for name, value, most in (
            ("token budget", self.token_budget, 1 << 20),
            ("number of sequences", self.max_num_seqs, 32_000),
            ("number of replicas", self.replicas, 10_000),
        ):
            if not 1 <= value <= most:
                raise CannotSimulate(f"the {name} must be from 1 to {most}, not {value}")
        if not 0 < self.utilisation <= 1:
            raise CannotSimulate(f"the share of the memory must be above 0 and at most 1, not {self.utilisation:g}")
        length = self.length or self.shape.max_len
        if length < 2:
            raise CannotSimulate(f"sequences must have at least 2 tokens, not {length}")
        budget = iteration_tokens(self.policy, self.token_budget, length, self.max_num_seqs)
        if self.policy in WHOLE_PROMPTS:
            # No more than that: it is the baseline's tokens a batch.
            budget = iteration_tokens(self.policy, 0, length, self.max_num_seqs)
        return Limits(
            token_budget=budget,
            max_num_seqs=min(self.max_num_seqs, budget * self.stages),
            max_model_len=length,
            block_size=self.block_size,
            prefix_caching=self.prefix_caching,
            await_prefix=self.await_prefix,
            tile=self.tile,
            share=self.share,
            # A simulation shows what waiting does; nobody is turned away.
            max_queued=1 << 40,
            max_queued_tokens=1 << 60,
            policy=self.policy,
            slo=self.slo,
            admission=self.admission,
            prefill_replicas=self.prefill_replicas,
            prefill_tokens=self.prefill_tokens,
        )

    def link(self) -> KvLink | None:
        """Of KV blocks, if they move. Raises ``CannotSimulate`` if nothing would decode, or not by any link."""
        if not self.prefill_replicas:
            return None
        if not 0 < self.prefill_replicas < self.replicas:
            raise CannotSimulate(
                f"the number of replicas that compute prompts must be from 1 to {self.replicas - 1}, so that another"
                f" decodes, not {self.prefill_replicas}"
            )
        if not 0.001 <= self.kv_link <= 1e6:
            raise CannotSimulate(f"the link of KV blocks must be from 0.001 to 1e6 GB/s, not {self.kv_link:g}")
        return KvLink(self.shape.kv_token_bytes, self.kv_link * 1e3)

    def models(self) -> list[ReplicaModel]:
        """Of each replica."""
        cost = self.cost()
        blocks = self.blocks or cost.num_blocks(self.block_size, self.utilisation)
        profile = profile_of(self.cost()) if self.slo is not None else ()
        return [ReplicaModel(cost, self.stages, blocks, profile)] * self.replicas


def profile_of(cost: DeviceCost | ProfiledCost) -> tuple[Sample, ...]:
    """What the slowest stage's worker would measure of iterations of decodes and of chunks before it serves."""
    works = [Work(rows, rows, rows * context, [], rows, 0.0) for rows, context in ((1, 32), (16, 32), (16, 1024))]
    for taken, before in ((64, 0), (16, 0), (64, 1984), (256, 0), (1024, 0)):
        works.append(Work(taken, 0, 0, [(taken, before)], 1, taken * (before + 0.5 * (taken + 1))))
    samples: list[Sample] = []
    for work in works:
        took = max(cost.stage_us(stage, work) for stage in range(cost.stages))
        samples.append(Sample(work.tokens - work.decodes, int(work.attention), work.decodes, work.kv_tokens, took))
    return tuple(samples)


def parse_devices(text: str) -> tuple[int, str]:
    """``4xh100`` → (4, "h100"): tensor-parallel ranks of a stage, and what they are."""
    several = _SEVERAL.fullmatch(text)
    return (1, text) if several is None else (int(several[1]), several[2])


def served_cost(model: str, devices: str, stages: int) -> tuple[ModelShape, DeviceCost | ProfiledCost]:
    """``model`` on ``stages`` of ``devices`` (``parse_devices``). Raises ``CannotSimulate``."""
    ranks, name = parse_devices(devices)
    device = load_description(name)
    shape = shape_for(device, model) if isinstance(device, Profile) else load_shape(model)
    cost = Scenario(shape, device, ranks=ranks, stages=stages).cost()
    cost.num_blocks(16)
    return shape, cost

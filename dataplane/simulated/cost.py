"""How long an iteration takes on a described device: kernels, collectives, and the host that launches them.

A stage runs its share of the layers. Each layer costs its linear layers (``linear_ms``), the passes over elements,
one or two all-reduces of 2·n·hidden bytes between tensor-parallel ranks, and attention (``prefill_ms`` for each
chunk, ``decode_ms`` for all decodes together). The first stage adds the embedding, the last the head of the rows that
sample. Kernels are summed and divided by the device's speed; then the host's floor is a maximum, and its work comes
on top (``device.Host``). Times are milliseconds inside and whole microseconds outside.

What depends on the number of tokens alone is computed once for each number.
"""

from __future__ import annotations

from math import ceil
from typing import Protocol

from .device import Device, Host, Link
from .refusal import CannotSimulate
from .shape import ModelShape

#: A chunk of a prompt: its tokens, and those computed before it.
Chunk = tuple[int, int]
#: Attention of chunks works on so many rows at once.
_ROWS = 128


class Work:
    """What of an iteration its cost depends on.

    ``tokens`` of the batch, ``decodes`` among them, which read ``kv_tokens``; the ``chunks`` of prompts; ``sampled``
    rows. ``attention``: pairs of a chunk's token and one that it attends to.
    """

    __slots__ = ("attention", "chunks", "decodes", "kv_tokens", "sampled", "tokens")

    def __init__(
        self, tokens: int, decodes: int, kv_tokens: int, chunks: list[Chunk], sampled: int, attention: float
    ) -> None:
        self.tokens = tokens
        self.decodes = decodes
        self.kv_tokens = kv_tokens
        self.chunks = chunks
        self.sampled = sampled
        self.attention = attention


class Cost(Protocol):
    """What a simulated replica asks of a model of its device."""

    def stage_us(self, stage: int, work: Work) -> int:
        """Microseconds of an iteration on a stage."""
        ...

    def transfer_us(self, tokens: int) -> int:
        """Microseconds until the next stage has the hidden states of so many tokens."""
        ...


class DeviceCost:
    """The cost of ``shape`` on ``stages`` × ``ranks`` of ``device``. Implements ``Cost``.

    ``host``: one of the device's, by name, or one's own. ``speed``: of the device, 1 as described. Raises
    ``CannotSimulate`` if the model cannot be divided so, or no such all-reduce was measured.
    """

    def __init__(
        self,
        device: Device,
        shape: ModelShape,
        *,
        ranks: int = 1,
        stages: int = 1,
        host: str | Host = "eager",
        speed: float = 1.0,
    ) -> None:
        if stages < 1 or ranks < 1 or stages > shape.layers:
            raise CannotSimulate(f"{shape.name} has {shape.layers} layers: not for {stages} stages of {ranks} ranks")
        if shape.heads % ranks:
            raise CannotSimulate(f"{shape.name} has {shape.heads} heads, which {ranks} ranks cannot share evenly")
        if not 0.01 <= speed <= 100:
            raise CannotSimulate(f"a device's speed is from 0.01 to 100, not {speed:g}")
        self.device, self.shape, self.ranks, self.stages, self.speed = device, shape, ranks, stages, speed
        if isinstance(host, str):
            known = device.hosts.get(host)
            if known is None:
                raise CannotSimulate(f"{device.name} has no host {host!r}: it has {', '.join(device.hosts)}")
            host = known
        self.host = host
        each, more = divmod(shape.layers, stages)
        #: Layers of each stage.
        self.layers = [each + (stage < more) for stage in range(stages)]
        self._kv_heads = max(shape.kv_heads // ranks, 1)
        self._heads = shape.heads // ranks
        self._reduce = self._find_reduce()
        self._send = device.links.send if ranks * stages <= device.links.node else device.links.send_far
        fixed = host.fixed_ms
        if stages > 1:
            fixed = host.fixed_pipeline_ms
        elif ranks > 1:
            fixed = host.fixed_tensor_ms
        self._fixed = fixed / stages
        self._each = host.sequence_ms / stages
        self._tiles = [(*(int(side) for side in tile.split("x")), rate) for tile, rate in device.linear.tiles.items()]
        self._layer: dict[int, float] = {}  #: by tokens: what a layer costs but for attention
        self._ends: dict[tuple[int, int], float] = {}  #: by tokens and sampled rows: embedding and head

    def _find_reduce(self) -> Link | None:
        ranks, links = self.ranks, self.device.links
        if ranks == 1:
            return None
        known = links.all_reduce if ranks <= links.node else links.all_reduce_far
        link = known.get(str(ranks))
        if link is None:
            where = "on one machine" if ranks <= links.node else "across machines"
            have = ", ".join(known) or "none"
            raise CannotSimulate(
                f"{self.device.name} has no all-reduce of {ranks} ranks {where} (known: {have}); describe it in"
                " a file of your own"
            )
        return link

    # ---- parts, in milliseconds ------------------------------------------------------------------------------

    def linear_ms(self, rows: int, inputs: float, outputs: float) -> float:
        """A product of ``rows`` × ``inputs`` with ``inputs`` × ``outputs``: by the best of the tiles."""
        linear = self.device.linear
        best = float("inf")
        for height, width, rate in self._tiles:
            waves = ceil(rows / height) * ceil(outputs / width) / linear.units
            waves = (1 - linear.partial) * waves + linear.partial * ceil(waves)
            ms = waves * height * width * 2 * inputs / rate
            if ms < best:
                best = ms
        size = self.shape.value_bytes * (rows * inputs + inputs * outputs + rows * outputs)
        memory, norm = size / linear.bytes_per_ms, linear.norm
        return linear.start_ms + (memory**norm + best**norm) ** (1 / norm)

    def products_ms(self, tokens: int) -> float:
        """All linear layers of one layer on one rank."""
        shape, ranks = self.shape, self.ranks
        queries = self._heads * shape.head_dim
        attention = self.linear_ms(tokens, shape.hidden, queries + 2 * self._kv_heads * shape.head_dim)
        attention += self.linear_ms(tokens, queries, shape.hidden)
        inner = shape.inner / ranks
        up = inner * (2 if shape.gated else 1)
        if shape.experts == 1:
            return attention + self.linear_ms(tokens, shape.hidden, up) + self.linear_ms(tokens, inner, shape.hidden)
        # Tokens choose experts as if by chance: so many are chosen by any of them, by so many tokens each.
        passes = tokens * shape.active
        chosen = shape.experts * (1 - (1 - 1 / shape.experts) ** passes)
        rows = max(1, round(passes / chosen))
        return attention + chosen * (
            self.linear_ms(rows, shape.hidden, up) + self.linear_ms(rows, inner, shape.hidden)
        )

    def elements_ms(self, tokens: int) -> float:
        """Norms, rotary positions, activation and residual additions of one layer on one rank."""
        shape, kernels = self.shape, self.device.elementwise
        hidden = tokens * shape.hidden
        rotated = tokens * (self._heads + self._kv_heads) * shape.head_dim
        active = tokens * shape.active * shape.inner / self.ranks
        norms = 1 if shape.parallel else 2
        ms = norms * (kernels.norm.start_ms + kernels.norm.element_ms * hidden)
        ms += kernels.rope.start_ms + kernels.rope.element_ms * rotated
        ms += kernels.activation.start_ms + kernels.activation.element_ms * active
        return ms + 2 * (kernels.add.start_ms + kernels.add.element_ms * hidden)

    def reduces_ms(self, tokens: int) -> float:
        """All-reduces of one layer."""
        if self._reduce is None:
            return 0.0
        size = self.shape.value_bytes * tokens * self.shape.hidden
        return (1 if self.shape.parallel else 2) * self._reduce.ms(size)

    def prefill_ms(self, taken: int, before: int) -> float:
        """Attention of one chunk in one layer: ``taken`` tokens after ``before`` others."""
        window = self.shape.window
        prefill = self.device.prefill
        share = self._heads * self.shape.head_dim / 128 / 32
        busy = min(max(ceil(taken / _ROWS) * self._heads / prefill.units, 0.3), 1.0)
        rows = _ROWS * ceil(taken / _ROWS)
        square, oblong = rows * rows / 1e6, rows * before / 1e6
        context = before
        if 0 < window < before + taken:
            # Until the window is full a token sees one more than the last; then all see as many.
            growing = max(0, window - before)
            grown = rows * growing / taken
            oblong = (grown * before + (rows - grown) * window) / 1e6
            square = grown * grown / 1e6
            context = min(before, window)
        c = prefill.coefficients
        ms = c[0] + c[1] * taken / 1e3 * share + c[2] * context / 1e3
        ms += (c[3] * oblong + c[4] * square) / busy * share
        return ms + (c[5] * oblong + c[6] * square) * share

    def decode_ms(self, decodes: int, kv_tokens: int) -> float:
        """Attention of all decodes in one layer."""
        if not decodes:
            return 0.0
        decode, window = self.device.decode, self.shape.window
        mean = kv_tokens / decodes
        if 0 < window < mean:
            # What the shorter of them have below the window is not known: all are taken to be of the mean length.
            mean = float(window)
        heads = self._kv_heads
        megabytes = decodes * mean * heads * self.shape.head_dim * 2 * self.shape.value_bytes / 1e6
        ms = decode.start_ms + decode.megabyte_ms * megabytes + decode.head_ms * decodes * heads
        return ms + decode.context_ms * min(mean, 1024.0)

    # ---- an iteration ----------------------------------------------------------------------------------------

    def stage_us(self, stage: int, work: Work) -> int:
        tokens = work.tokens
        layer = self._layer.get(tokens)
        if layer is None:
            layer = self.products_ms(tokens) + self.elements_ms(tokens) + self.reduces_ms(tokens)
            self._layer[tokens] = layer
        attention = self.decode_ms(work.decodes, work.kv_tokens)
        for taken, before in work.chunks:
            attention += self.prefill_ms(taken, before)
        layers = self.layers[stage]
        ms = layers * (layer + attention)
        if stage == 0:
            kernel = self.device.elementwise.embedding
            ms += kernel.start_ms + kernel.element_ms * tokens * self.shape.hidden
        if stage == self.stages - 1 and work.sampled:
            ms += self._head(work.sampled)
        ms /= self.speed
        floor = layers * self.host.layer_ms
        if ms < floor:
            ms = floor
        ms += self._fixed + self._each * (work.decodes + len(work.chunks))
        return max(1, round(ms * 1e3))

    def _head(self, rows: int) -> float:
        known = self._ends.get((rows, 0))
        if known is None:
            known = self._ends[rows, 0] = self.linear_ms(rows, self.shape.hidden, self.shape.vocab / self.ranks)
        return known

    def transfer_us(self, tokens: int) -> int:
        size = self.shape.value_bytes * tokens * self.shape.hidden / self.ranks
        return round(self._send.ms(size) * 1e3)

    def iteration_us(self, work: Work) -> int:
        """Of all stages, one after the other, transfers included."""
        stages = range(self.stages)
        return sum(self.stage_us(stage, work) for stage in stages) + (self.stages - 1) * self.transfer_us(work.tokens)

    # ---- memory ----------------------------------------------------------------------------------------------

    def num_blocks(self, block_size: int, utilisation: float = 0.85) -> int:
        """Blocks of the KV pool of each device when ``utilisation`` of its memory is for weights and cache. Raises
        ``CannotSimulate`` if the weights alone are more."""
        devices = self.ranks * self.stages
        memory = self.device.memory_bytes * utilisation - self.shape.weight_bytes / devices
        kv = self.shape.kv_token_bytes / self.stages * self._kv_heads / self.shape.kv_heads
        blocks = int(memory / (kv * block_size))
        if blocks < 1:
            raise CannotSimulate(
                f"{self.shape.name} needs {self.shape.weight_bytes / 1e9:.0f} GB for its weights,"
                f" {devices} of {self.device.name} have {devices * self.device.memory_bytes * utilisation / 1e9:.0f}"
                " for weights and cache"
            )
        return blocks

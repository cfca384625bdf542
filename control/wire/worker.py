"""Messages between the control process and its workers (and the launcher, which watches them).

A batch plan is a difference: workers keep slot-indexed state and apply, in this order, releases, registrations,
growth, and the run itself. The REGISTER frames that belong to a plan and the PLAN are the frames of one ZeroMQ
message, so that a plan never arrives without them.
"""

from typing import Annotated

from msgspec import Meta, Struct

from .client import GREEDY, Sampling
from .fields import (
    MAX_ENTRIES,
    U16,
    U32,
    U64,
    Bitmap,
    BlockBuffer,
    Count,
    FloatBuffer,
    Name,
    SlotBuffer,
    StopIds,
    Text,
    TokenBuffer,
)


class Start(Struct, array_like=True, frozen=True, tag=1):
    """Begin an epoch: drop all slots, expect step 0. Sent when every rank of the replica has dialled in.

    ``links`` is a directory private to the replica where neighbouring stages meet; the names in it carry the epoch.
    """

    epoch: U32
    stages: U16
    num_blocks: U32
    block_size: U16
    num_slots: U32
    token_budget: U32
    max_model_len: Count
    links: Text


class Register(Struct, array_like=True, frozen=True, tag=2):
    """Everything a worker must know of a sequence. The same for a new, a preempted and a recovered one.

    ``tokens`` are all known ids, of which ``computed`` already have their KV in ``blocks`` (a cached prefix).
    ``prompt_len`` is the boundary between prompt and output. A token is flagged as a stop if it is one of
    ``stop_ids`` and the sequence, with it, has at least ``min_len`` tokens.
    """

    slot: U16
    generation: U32
    request: U64
    tokens: TokenBuffer
    prompt_len: Count
    computed: Count
    blocks: BlockBuffer
    max_len: Count
    min_len: Count = 0
    stop_ids: StopIds = ()
    sampling: Sampling = GREEDY


class BatchPlan(Struct, array_like=True, frozen=True, tag=3):
    """One iteration. Rows: the decoding slots by slot, then the chunks by slot.

    ``decodes`` is the bitmap of slots that gain one token; ``grow_slots[i]`` gains block ``grow_blocks[i]`` at the
    end of its table; the chunk of ``chunk_slots[i]`` has ``chunk_tokens[i]`` tokens (u32). A chunk samples when it
    ends at the sequence's last known token.
    """

    epoch: U32
    step: U32
    lane: U16
    decodes: Bitmap
    grow_slots: SlotBuffer = b""
    grow_blocks: BlockBuffer = b""
    chunk_slots: SlotBuffer = b""
    chunk_tokens: Annotated[bytes, Meta(max_length=4 << 16)] = b""
    released: SlotBuffer = b""


class Heartbeat(Struct, array_like=True, frozen=True, tag=4):
    """Sign of life, both ways. ``instance`` names the control process's life, 0 from a worker."""

    epoch: U32 = 0
    instance: U64 = 0


class Redial(Struct, array_like=True, frozen=True, tag=5):
    """The worker is not known here (the control process was restarted): say hello again, keep the weights."""

    instance: U64 = 0


class Quit(Struct, array_like=True, frozen=True, tag=6):
    """End: nothing will be asked of this worker again. ``refused``: it was not wanted in the first place."""

    reason: Text = ""
    refused: bool = False


class KillWorker(Struct, array_like=True, frozen=True, tag=7):
    """To the launcher: this worker hangs or is out of step; end it (``pid``, if it still is that one).

    ``pid`` 0: nobody has dialled in from this place for long; end whoever lives there longer than loading takes.
    """

    replica: U16
    stage: U16
    rank: U16
    pid: U32


class Fatal(Struct, array_like=True, frozen=True, tag=8):
    """To the launcher: the service cannot start as configured. Say ``message`` last and exit with code 1."""

    message: Text


class Terms(Struct, array_like=True, frozen=True, tag=9):
    """The answer to a ``Probe``: what the launcher was told, as far as workers need it."""

    replicas: U16
    stages: U16
    block_size: U16
    token_budget: U32
    max_num_seqs: U32
    model: Name = ""


class Hello(Struct, array_like=True, frozen=True, tag=16):
    """A worker dials in: who it is and what it can do."""

    version: U32
    replica: U16
    stage: U16
    rank: U16
    stages: U16
    pid: U32
    model: Name
    #: Token ids that end a sequence unless the request says otherwise.
    eos_ids: StopIds
    block_size: U16
    num_blocks: U32
    max_tokens: U32
    num_slots: U32
    max_model_len: Count
    vocab_size: U32
    device: Name = "cpu"
    #: The batch total that the device computes without waste; 0 means any.
    tile: U16 = 0
    #: Keys and values of a longer prompt depend on its length too: only prompts of one length share them. 0: never.
    prefix_limit: Count = 0
    #: Started by hand, not by the launcher.
    external: bool = False
    #: Where it runs: workers with the same can share memory. The part before a slash is for people.
    host: Name = ""


class Probe(Struct, array_like=True, frozen=True, tag=26):
    """Before a worker is started by hand: is there such a place, and what must it know? Answered by ``Terms`` or
    ``Quit``. What is 0 is left open."""

    version: U32
    replica: U16
    stage: U16
    rank: U16 = 0
    stages: U16 = 0


class Sample(Struct, array_like=True, frozen=True):
    """What an iteration took on the worker's device: ``took_us`` microseconds for ``prefill`` tokens of chunks whose
    tokens attend to ``attention`` others in all, and ``decodes`` that read ``kv_tokens``."""

    prefill: U32
    attention: U64
    decodes: U32
    kv_tokens: U64
    took_us: U64


class Started(Struct, array_like=True, frozen=True, tag=17):
    """The worker is ready for the plans of this epoch. ``profile``: what it measured while it warmed up."""

    epoch: U32
    profile: Annotated[list[Sample], Meta(max_length=64)] = []


class Logprobs(Struct, array_like=True, frozen=True):
    """Log-probabilities of consecutive tokens of the sequence in ``slot``, the first of them at index ``start``.

    The index counts prompt and output tokens from 0; a prompt's first token has none. ``values`` (f32) and ``ranks``
    (u32, 1 is the most likely) have one entry a token; ``top_ids`` (u32) and ``top_values`` (f32) have the best k of
    each, best first, equal ones by id.
    """

    slot: U16
    start: Count
    values: FloatBuffer
    ranks: TokenBuffer
    top_ids: TokenBuffer = b""
    top_values: FloatBuffer = b""


class Result(Struct, array_like=True, frozen=True, tag=18):
    """What one rank says of one iteration. Times are microseconds of the rank's own monotonic clock.

    ``ids`` and ``stopped`` come from the last stage's first rank only: ``ids`` is indexed by slot, up to the largest
    slot that sampled; entries of other slots mean nothing. ``stopped`` lists slots that met a stop id.
    ``digest`` is the rank's checksum of the tables of the slots under audit at this step (None at most steps).
    ``logprobs`` come with ``ids``, for the rows that ask for them: one entry with one token for a sampled id, one
    entry a chunk for the prompt tokens after its positions.
    """

    epoch: U32
    step: U32
    lane: U16
    received_us: U64
    started_us: U64
    ended_us: U64
    #: Time since the end of the iteration before, of which ``starved_us`` before this plan had come.
    idle_us: U64
    starved_us: U64 = 0
    ids: TokenBuffer = b""
    stopped: SlotBuffer = b""
    digest: U32 | None = None
    logprobs: Annotated[list[Logprobs], Meta(max_length=MAX_ENTRIES)] = []


class Resync(Struct, array_like=True, frozen=True, tag=20):
    """A worker refuses a plan (gap, foreign epoch, broken reference) and asks for everything again."""

    epoch: U32
    expected: U32
    reason: Text


class LauncherHello(Struct, array_like=True, frozen=True, tag=24):
    """The launcher dials in, to report deaths and to be asked for kills."""

    version: U32
    pid: U32


class WorkerExited(Struct, array_like=True, frozen=True, tag=25):
    """From the launcher: a worker process is gone. ``status`` as in ``subprocess``: negative for a signal."""

    replica: U16
    stage: U16
    rank: U16
    pid: U32
    status: int


ToWorker = Start | Register | BatchPlan | Heartbeat | Redial | Quit | KillWorker | Fatal | Terms
FromWorker = Hello | Started | Result | Heartbeat | Resync | LauncherHello | WorkerExited | Probe

"""Messages between a client (a gateway, the Python client, a foreign client) and the control process."""

from typing import Annotated

from msgspec import Meta, Struct

from .fields import (
    MAX_ENTRIES,
    U16,
    U32,
    U64,
    Bitmap,
    Count,
    FloatBuffer,
    KeyBuffer,
    Name,
    SlotBuffer,
    StopIds,
    Text,
    TokenBuffer,
)

#: Most tokens with a bias in one request.
MAX_BIASES = 1024
#: Priorities reach from the negative of this to this.
MAX_PRIORITY = 1000
#: The longest deadline: a day.
MAX_DEADLINE_MS = 86_400_000
#: The longest target of a time between tokens.
MAX_TBT_MS = 60_000
#: Most alternatives reported with a token's log-probability.
MAX_TOP_LOGPROBS = 20

Probability = Annotated[float, Meta(gt=0.0, le=1.0)]
Temperature = Annotated[float, Meta(ge=0.0, le=100.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
Alternatives = Annotated[int, Meta(ge=-1, le=MAX_TOP_LOGPROBS)]
BiasBuffer = Annotated[bytes, Meta(max_length=4 * MAX_BIASES)]


class Sampling(Struct, array_like=True, frozen=True):
    """How a token is drawn. ``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1 and the other defaults are off.

    The generator is keyed by (``seed``, ``index``, position), so a sequence's draws depend on nothing else.
    A row of logits is changed in this order: ``bias_values[i]`` (f32, -100 to 100) is added to token ``bias_ids[i]``
    (u32, each once); ``repetition`` divides the positive and multiplies the negative logits of tokens that occur in
    prompt or output; ``presence`` is subtracted once from tokens that occur in the output, ``frequency`` as often
    as they occur; stop ids are masked below the minimum length; then temperature, ``top_k``, ``top_p``, and
    ``min_p``, which keeps tokens at least that fraction as probable as the best one.

    ``logprobs`` k from 0 asks for the log-probability of each sampled token and of the k best, ``prompt_logprobs``
    for those of the prompt's tokens from the second on; -1 is off. They are of the logits before any change.
    """

    temperature: Temperature = 0.0
    top_k: U32 = 0
    top_p: Probability = 1.0
    seed: U64 = 0
    index: U32 = 0
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    repetition: Annotated[float, Meta(ge=0.01, le=10.0)] = 1.0
    presence: Penalty = 0.0
    frequency: Penalty = 0.0
    bias_ids: BiasBuffer = b""
    bias_values: BiasBuffer = b""
    logprobs: Alternatives = -1
    prompt_logprobs: Alternatives = -1


GREEDY = Sampling()


class ClientHello(Struct, array_like=True, frozen=True, tag=32):
    """First message of a connection.

    ``session`` is that of the last ``Welcome``, if there was one: the requests of that session end at once, as this
    client goes on with them itself by submitting them as continuations.
    """

    version: U32
    name: Name = ""
    session: U64 = 0


class Submit(Struct, array_like=True, frozen=True, tag=33):
    """Ask for a completion of ``tokens``.

    ``key`` is the client's own name for the request, unique while the request lives. Tokens past ``prompt_len``
    were already generated and received: the request is a continuation, as after a restart of the control process.
    ``max_tokens`` bounds the whole output, the continued part included; 0 means as many as the model allows.
    Requests with different ``salt`` never share cached blocks. ``leader`` is the key of another request of this
    client with the same prompt, whose prompt blocks this one wants to share: it waits until the leader's prompt is
    computed, or no longer will be, and goes where the leader went. A leader that is not running is ignored.

    ``tenant`` is on whose account the request runs, as far as the admission order cares. A smaller ``priority`` is
    taken earlier. A request that has not ended ``deadline_ms`` after it came is ended then; 0 is no deadline.
    ``slo`` names the class of its time between tokens, empty for the server's own; ``tbt_ms`` is a target of its
    own instead, 0 for none.
    """

    key: U64
    request: Name
    tokens: TokenBuffer
    prompt_len: Count
    max_tokens: Count = 0
    sampling: Sampling = GREEDY
    stop_ids: StopIds = ()
    min_tokens: Count = 0
    salt: Annotated[bytes, Meta(max_length=64)] = b""
    leader: U64 | None = None
    tenant: Name = ""
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    deadline_ms: Annotated[int, Meta(ge=0, le=MAX_DEADLINE_MS)] = 0
    slo: Name = ""
    tbt_ms: Annotated[int, Meta(ge=0, le=MAX_TBT_MS)] = 0


class Abort(Struct, array_like=True, frozen=True, tag=34):
    """End a request at once. Idempotent; no plan made afterwards names it."""

    key: U64


#: Most rows of a ``StatusReply``.
MAX_ROWS = 1024
Rows = Annotated[int, Meta(ge=0, le=MAX_ROWS)]


class Status(Struct, array_like=True, frozen=True, tag=35):
    """Ask for one ``StatusReply``, with at most ``rows`` of the unfinished requests."""

    nonce: U64 = 0
    rows: Rows = 0


class Subscribe(Struct, array_like=True, frozen=True, tag=36):
    """Ask for a ``StatusReply`` every ``interval_ms`` milliseconds until 0 is sent or the client goes silent."""

    interval_ms: Annotated[int, Meta(ge=0, le=60_000)] = 1000
    #: Unfinished requests in each reply, at most.
    rows: Rows = 0


class ClientPing(Struct, array_like=True, frozen=True, tag=37):
    """Sign of life. Sent once a second. A client silent for ten seconds is gone and its requests are aborted."""


class Welcome(Struct, array_like=True, frozen=True, tag=48):
    """Answer to a hello, and again whenever ``ready`` or a limit changes.

    ``instance`` names this life of the control process: a client that sees another one resubmits its unfinished
    requests as continuations. ``session`` is a secret between the control process and this client, which the client
    names when it must say hello again. ``max_requests`` is how many of its requests may be unfinished at once.
    """

    version: U32
    instance: U64
    model: Name
    ready: bool
    max_model_len: Count
    vocab_size: U32
    block_size: U16
    #: The longest sequence (prompt and output) that the block pool can hold.
    max_sequence: Count
    max_num_seqs: U32
    token_budget: U32
    eos_ids: StopIds = ()
    session: U64 = 0
    max_requests: U32 = 0
    #: Where iteration records are published; empty if they are not.
    events: Text = ""


#: ``End.slot`` of a request that owned none.
NO_SLOT = 0xFFFF


class End(Struct, array_like=True, frozen=True):
    """A request's ownership of ``slot`` is over (``NO_SLOT``: it owned none).

    ``reason``: ``stop``, ``length``, ``abort``, ``error``, ``deadline`` (its time was over) and ``queue_timeout``
    (it was not begun in the time that the server allows) finish the request; ``paused`` does not (preempted or its
    replica was lost): its tokens go on later under another start.
    """

    key: U64
    slot: U16
    reason: Annotated[str, Meta(max_length=16)]
    output_tokens: Count = 0
    cached_tokens: Count = 0
    message: Text = ""


class TokenLogprobs(Struct, array_like=True, frozen=True):
    """Log-probabilities of consecutive tokens of request ``key``, the first of them at index ``start``.

    The index counts prompt and output tokens from 0. ``values`` (f32) and ``ranks`` (u32, 1 is the most likely) have
    one entry a token; ``top_ids`` (u32) and ``top_values`` (f32) have the best k of each, best first.
    """

    key: U64
    start: Count
    values: FloatBuffer
    ranks: TokenBuffer
    top_ids: TokenBuffer = b""
    top_values: FloatBuffer = b""


Ends = Annotated[list[End], Meta(max_length=MAX_ENTRIES)]
AllLogprobs = Annotated[list[TokenLogprobs], Meta(max_length=MAX_ENTRIES)]


class Tick(Struct, array_like=True, frozen=True, tag=49):
    """The tokens that one iteration gave to one client's requests.

    In this order: ``start_slots[i]`` now belongs to request ``start_keys[i]``; each set bit of ``live`` is a slot
    with one new token; each of ``ends`` takes effect. With ``dense`` the token of slot *s* is ``ids[s]`` (entries of
    slots whose bit is clear mean nothing), else ``ids`` has one entry per set bit, by slot. ``sequence`` counts the
    ticks sent to this client since its hello, from 0, without gaps. Slots are those of ``replica``.
    ``logprobs`` are of the tokens of this tick, and of prompt tokens computed in its iteration.
    """

    sequence: U64
    step: U64
    live: Bitmap
    dense: bool
    ids: TokenBuffer
    start_slots: SlotBuffer = b""
    start_keys: KeyBuffer = b""
    ends: Ends = []
    replica: U16 = 0
    logprobs: AllLogprobs = []


class Run(Struct, array_like=True, frozen=True):
    """Tokens of one request, in order."""

    key: U64
    ids: TokenBuffer


class Owned(Struct, array_like=True, frozen=True):
    """``slots[i]`` (u16) of ``replica`` belongs to request ``keys[i]`` (u64)."""

    replica: U16
    slots: SlotBuffer
    keys: KeyBuffer


class Merged(Struct, array_like=True, frozen=True, tag=53):
    """Several ticks in one, for a client that reads slower than it is written to. Nothing is left out.

    In this order: each of ``runs`` continues the tokens of its request; each of ``ends`` takes effect; then the
    slots that this client's requests own are those of ``owned`` and no others. ``sequence`` counts on from the last
    tick: this message stands for one. A request has one run at most; its pauses are not told, nor an end's slot.
    """

    sequence: U64
    runs: Annotated[list[Run], Meta(max_length=MAX_ENTRIES)] = []
    ends: Ends = []
    owned: Annotated[list[Owned], Meta(max_length=MAX_ENTRIES)] = []
    logprobs: AllLogprobs = []


class Refused(Struct, array_like=True, frozen=True, tag=50):
    """A message could not be accepted. ``key`` names the request, if it was about one.

    ``code``: ``invalid`` (``field`` and the allowed range are named), ``too_long``, ``overloaded`` (``field`` is the
    limit that is reached), ``deadline`` (it passed before there were workers), ``draining``, ``protocol`` (the frame
    is no message of this version).
    """

    key: U64 | None
    code: Annotated[str, Meta(max_length=32)]
    field: Name
    message: Text
    retry_after_ms: U32 = 0


class RequestRow(Struct, array_like=True, frozen=True):
    """An unfinished request. ``phase``: ``waiting``, ``prefill``, ``decode``, or ``settling`` (it left its lane, its
    last results are on their way).

    Tokens: ``prompt``, of which ``computed`` are done and ``cached`` were found in the prefix cache; ``output`` so
    far, of at most ``limit``. ``age_ms`` counts from its arrival in this life of the control process.
    """

    request: Name
    replica: U16 | None
    phase: Annotated[str, Meta(max_length=16)]
    prompt: Count
    computed: Count
    cached: Count
    output: Count
    limit: Count
    age_ms: U64


class StatusReply(Struct, array_like=True, frozen=True, tag=51):
    """Counters and gauges of the control process, flat: name to number, labels in the name as Prometheus writes them.

    ``requests`` are the unfinished ones that were asked for: those that run, then those that wait, each by admission
    order.
    """

    nonce: U64
    instance: U64
    model: Name
    ready: bool
    draining: bool
    values: Annotated[dict[Name, float], Meta(max_length=MAX_ENTRIES)]
    replicas: Annotated[list[Name], Meta(max_length=1 << 16)] = []
    requests: Annotated[list[RequestRow], Meta(max_length=MAX_ROWS)] = []


class Unknown(Struct, array_like=True, frozen=True, tag=52):
    """The peer is not known here (the control process was restarted): say hello again."""

    instance: U64 = 0


FromClient = ClientHello | Submit | Abort | Status | Subscribe | ClientPing
ToClient = Welcome | Tick | Refused | StatusReply | Unknown | Merged

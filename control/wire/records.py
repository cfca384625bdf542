"""What the control process publishes on its ``events`` socket: may be lost, and is made only while somebody listens.

One message, one frame, one record. Any subscription that the socket accepts gets all of them. A subscriber that does
not keep up misses records; it sees that from the steps, which have no gaps within an epoch.
"""

from typing import Annotated

from msgspec import Meta, Struct

from .fields import U16, U32, U64


class StageTimes(Struct, array_like=True, frozen=True):
    """One stage's part in an iteration, as in ``Result``: microseconds of the monotonic clock of its own machine.

    ``idle_us`` is the time since the end of the stage's iteration before, of which ``starved_us`` before this plan
    had come.
    """

    received_us: U64
    started_us: U64
    ended_us: U64
    idle_us: U64
    starved_us: U64 = 0


class IterationRecord(Struct, array_like=True, tag=64):
    """One iteration of one replica, published when all its stages have returned it.

    Times are microseconds of the control process's monotonic clock: ``planned_us`` when the event that led to the
    plan was taken up, ``sent_us`` when the plan was handed to the sockets, ``returned_us`` when the last stage's
    result was taken up. The batch: ``tokens`` = ``decodes`` + ``chunk_tokens`` of at most ``budget``, ``chunks``
    pieces of prompts, and ``kv_tokens`` cached tokens read by the decodes. The rest is the state of the replica right
    after the plan was made: requests and tokens in the queue, sequences that run, blocks, preemptions in this epoch.
    ``predicted_us``: what the iteration was expected to take on one stage, 0 without a model of it.
    """

    replica: U16
    epoch: U32
    step: U32
    lane: U16
    planned_us: U64
    sent_us: U64
    returned_us: U64
    stages: Annotated[list[StageTimes], Meta(max_length=1024)]
    tokens: U32
    decodes: U32
    chunks: U32
    chunk_tokens: U32
    budget: U32
    kv_tokens: U64
    queued: U32
    queued_tokens: U64
    running: U32
    blocks_used: U32
    blocks_cached: U32
    blocks_free: U32
    preemptions: U32
    predicted_us: U64 = 0

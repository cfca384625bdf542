"""What every policy is: a small object that chooses the contents of a lane's next iteration.

A policy is asked when a plan may be out. It lets the lane's decodes run, or not, and gives chunks of prompts to
compute; it may admit requests meanwhile. All state but its own few words is the replica's, so the rest of the core
(blocks, lanes, preemption, recovery) is the same under every policy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .sequence import Sequence

if TYPE_CHECKING:
    from .lane import Lane
    from .replica import Replica

#: Sequences and how many of their tokens to compute, at least one each.
Chunks = list[tuple[Sequence, int]]


class Policy:
    """Base of the policies."""

    #: A sequence gets the blocks of its maximum length when it is admitted. It never grows, so nothing is preempted.
    reserves: bool = False
    #: A sequence decodes in the lane that computed its prompt, to its end. Else it decodes in any lane and may move.
    stays: bool = False

    def choose(self, replica: Replica, lane: Lane) -> Chunks:
        """Choose the contents of the next iteration of ``lane``: the chunks that are returned, and its decodes if
        ``replica.run_decodes`` is called. Admits requests (``replica.admit``) as a side effect, but only if the
        iteration is not empty then. Decodes and chunks have at most the token budget in all.
        """
        raise NotImplementedError

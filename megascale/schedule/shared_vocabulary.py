"""Vocabulary parallelism in a pipeline (Yeung et al. 2024, arXiv:2411.05288): every rank has rows of the embedding and
of the head, and runs passes over them for every micro-batch, besides the actions of its stages:

    EMBED        before F of the first stage    the ranks' rows for the tokens are summed
    HIDDEN       after F of the last stage      its output goes to all ranks
    VS                                          logits, their maximum, sum of exponentials, and label's logit
    STATS        after all VS, the barrier      the statistics go to all ranks
    VT                                          the loss; with two barriers the gradient of HIDDEN; those of the rows
    HIDDEN_GRAD  before B of the last stage     that gradient is summed: after all VT, the second barrier; with a single
                                                barrier, where VS has computed it up to a factor, right after STATS
    EMBED_GRAD   after B of the first stage     the gradient of EMBED goes to all ranks

As a barrier takes about the time of a micro-batch's actions, every backward comes as many forwards later as there are
barriers: 1F1B has p + 1 or p + 2 micro-batches in flight.
"""

from __future__ import annotations

from collections.abc import Sequence

from megascale.layout.stages import Placement
from megascale.schedule.dependencies import Result
from megascale.schedule.ir import Action, Kind, RankSchedule, Schedule, each_action


def delay_backwards(order: RankSchedule, by: int) -> RankSchedule:
    """Move the backwards of a rank behind `by` more forwards, as far as there are any."""
    forwards = [action for action in each_action(order) if action.kind is Kind.F]
    delayed, before, taken = RankSchedule(), 0, 0
    for action in each_action(order):
        if action.kind is Kind.F:
            before += 1
        else:
            delayed += [*forwards[taken : before + by], action]
            taken = max(taken, min(before + by, len(forwards)))
    return delayed + forwards[taken:]


def microbatches(compute: Schedule) -> int:
    """Count the micro-batches of a schedule."""
    return 1 + max(action.microbatch for order in compute for action in each_action(order))


def exchanges_after(made: Sequence[Result], placement: Placement, m: int, *, training: bool) -> list[Action]:
    """List the exchanges of all ranks that follow results in the global order, of m micro-batches; none without
    vocabulary parallelism.
    """
    if not placement.barriers:
        return []
    v, last, found = placement.v, placement.count - 1, list[Action]()
    after = {(Kind.F, last): Kind.HIDDEN, (Kind.VS, last + 1): Kind.STATS, (Kind.I, 0): Kind.EMBED_GRAD}
    for kind, stage, i in made:
        if (kind, stage) in after:
            found.append(Action(after[kind, stage], v, i))
        elif (kind, stage) == (Kind.F, 0) and i + 1 < m:  # one micro-batch ahead
            found.append(Action(Kind.EMBED, v, i + 1))
        if training and kind is (Kind.VS if placement.barriers == 1 else Kind.VT):
            found.append(Action(Kind.HIDDEN_GRAD, v, i))
    return found

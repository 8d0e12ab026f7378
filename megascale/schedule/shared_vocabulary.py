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

from collections import Counter
from dataclasses import dataclass, field

from megascale.layout.stages import Placement
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


@dataclass
class Exchanges:
    """The exchanges of all ranks for `count` micro-batches, which lowering adds; none without vocabulary parallelism.
    `passed`: ranks that have run a pass, by kind and micro-batch.
    """

    placement: Placement
    count: int
    training: bool
    passed: Counter[tuple[Kind, int]] = field(default_factory=Counter)

    def after(self, action: Action, rank: int) -> list[Action]:
        """List the exchanges that follow an action of a rank in the global order."""
        if not self.placement.barriers:
            return []
        (kind, chunk, i), kinds = action, list[Kind]()
        stage = self.placement.stage(rank, chunk)
        if kind in (Kind.VS, Kind.VT):
            self.passed[kind, i] += 1
            if self.passed[kind, i] == self.placement.p:
                kinds = [Kind.STATS] if kind is Kind.VS else []
                barrier = Kind.VS if self.placement.barriers == 1 else Kind.VT
                kinds += [Kind.HIDDEN_GRAD] if self.training and kind is barrier else []
        elif kind is Kind.F:
            kinds = [Kind.HIDDEN] if stage == self.placement.count - 1 else []
            if stage == 0 and i + 1 < self.count:  # one micro-batch ahead
                return [Action(Kind.EMBED, self.placement.v, i + 1)]
        elif kind in (Kind.B, Kind.I) and stage == 0:
            kinds = [Kind.EMBED_GRAD]
        return [Action(joint, self.placement.v, i) for joint in kinds]

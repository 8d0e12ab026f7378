"""A check of a plan of hybrid data parallelism."""

from __future__ import annotations

from megascale.layout.hybrid.plan import HybridPlan
from megascale.layout.sequence_shard import TokenSpan, count


def check_plan(plan: HybridPlan) -> None:
    """Check that every token is trained on once, that no micro-batch exceeds the limit, that sequences that fit a rank
    stay on it, and that the ranks of a ring meet at one index.

    Raises: ValueError
    """
    seen = dict[int, list[TokenSpan]]()
    for rank, batches in enumerate(plan.microbatches):
        for index, (batch, held) in enumerate(zip(batches, plan.parts(rank), strict=True)):
            tokens = sum(count(parts) for _, parts in held)
            if not 0 < tokens <= plan.max_tokens:
                raise ValueError(
                    f"rank {rank}: micro-batch {index} has {tokens} tokens, the limit is {plan.max_tokens}"
                )
            for member in range(batch.first, batch.first + batch.ranks):
                if plan.microbatches[member][index] != batch:
                    raise ValueError(f"rank {member}: micro-batch {index} is not the ring of rank {rank}")
            for i, parts in held:
                if batch.ranks > 1 and plan.lengths[i] <= plan.max_tokens:
                    raise ValueError(f"sequence {i} of {plan.lengths[i]} tokens fits a rank, and is in a ring")
                seen.setdefault(i, []).extend(parts)
    for i, length in enumerate(plan.lengths):
        found = sorted(part for part in seen.get(i, []) if part.size)
        ends = [0, *(stop for _, stop in found)]
        if [start for start, _ in found] != ends[:-1] or ends[-1] != length:
            raise ValueError(f"sequence {i}: the parts {found} are not its {length} tokens, each once")

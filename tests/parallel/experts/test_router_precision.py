"""A router's logits are as precise as fp32 sums of operands in the compute dtype."""

from __future__ import annotations

import torch

from megascale.parallel.experts.grouped_linear import router_logits


def test_logits_that_bf16_cannot_tell_apart_choose_an_expert() -> None:
    """Expert 1 is ahead by 2^-12, below the last digit of bf16 at 3."""
    x = torch.tensor([[1.0, 1.0, 2**-12]], dtype=torch.bfloat16)
    weight = torch.tensor([[1.0, 2.0, 0.0], [1.0, 2.0, 1.0]], dtype=torch.bfloat16)
    logits = router_logits(x, weight)
    assert logits.dtype == torch.float32 and logits.tolist() == [[3.0, 3.0 + 2**-12]]
    assert (x @ weight.t()).tolist() == [[3.0, 3.0]]

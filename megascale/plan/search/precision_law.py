"""The loss of a training with quantized GEMMs, by the law of Sun et al. 2025 (arXiv:2501.02423, equation 18):

    L = n / N^alpha + d / D^beta + epsilon + (D^beta / N^alpha) log2(B) / (gamma (E + 1/2)^delta (M + 1/2)^nu)

of N weights of linear layers in blocks and D tokens, in nats per token, with E exponent and M mantissa bits and a scale
for B elements along a row. The last term grows with the tokens: beyond the critical ones, where dL/dD = 0, more tokens
raise the loss. The constants belong to the data, tokenizer and model that they were fitted on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from megascale.core.units import format_count
from megascale.plan.search.report import plain_table

N_FACTOR, N_POWER = 69.2343, 0.2368
D_FACTOR, D_POWER = 68973.0621, 0.5162
LEAST_LOSS = 1.9061
FORMAT_FACTOR, EXPONENT_POWER, MANTISSA_POWER = 11334.5197, 3.1926, 2.9543

FORMATS = {"bf16": (8, 7), "e4m3": (4, 3), "e5m2": (5, 2), "e2m1": (2, 1)}
"""Exponent and mantissa bits. bf16 is a format of the law like the others."""

FITTED = {"weights": (41e6, 679e6), "tokens": (10e9, 100e9), "block": (32, 512)}
"""The least and the largest of the runs that gave the constants."""

VALIDITY = (
    "fitted by Sun et al. 2025 on 41M to 679M weights of linear layers, 10B to 100B tokens and 32 to 512 elements per "
    "scale: dense models like Llama on Dolma 1.7, with quantized weights and inputs of wgrad alone, not inputs of "
    "forward nor output gradients; recipes that quantize these lose more\n"
    "the constants belong to that data, tokenizer and model: compare formats with them, and measure losses"
)


@dataclass(frozen=True)
class PrecisionLaw:
    """The law for a model with `weights` weights of linear layers, `tokens` tokens and a scale for `block` elements."""

    weights: float
    tokens: float
    block: int

    @property
    def plain_loss(self) -> float:
        """The loss without quantization."""
        return N_FACTOR / self.weights**N_POWER + D_FACTOR / self.tokens**D_POWER + LEAST_LOSS

    def added_loss(self, exponent: int, mantissa: int) -> float:
        """Return the part of the loss that quantization to a format adds."""
        return self.tokens**D_POWER * self._per_knowledge(exponent, mantissa)

    def critical_tokens(self, exponent: int, mantissa: int) -> float:
        """The tokens at which the loss is least."""
        return float((D_FACTOR / self._per_knowledge(exponent, mantissa)) ** (1 / (2 * D_POWER)))

    @property
    def outside(self) -> list[str]:
        """Name what is outside of the runs that gave the constants."""
        return [
            f"{format_count(value)} {'elements per scale' if name == 'block' else name}"
            for name, (least, most) in FITTED.items()
            if not least <= (value := getattr(self, name)) <= most
        ]

    def _per_knowledge(self, exponent: int, mantissa: int) -> float:
        """Return the loss that quantization adds, over D^beta."""
        resolution = FORMAT_FACTOR * (exponent + 0.5) ** EXPONENT_POWER * (mantissa + 0.5) ** MANTISSA_POWER
        return math.log2(self.block) / (self.weights**N_POWER * resolution)


def precision_tables(name: str, law: PrecisionLaw) -> Iterator[str | Table]:
    """Report the loss and the critical tokens of a configuration `name` by format, and where the law holds."""
    yield (
        f"{name}: {format_count(law.weights)} weights of linear layers, {format_count(law.tokens)} tokens, "
        f"a scale for {law.block} elements; loss without quantization {law.plain_loss:.4f}"
    )
    rows = []
    for label, bits in FORMATS.items():
        added, critical = law.added_loss(*bits), law.critical_tokens(*bits)
        cells = f"{law.plain_loss + added:.4f}", f"{added:.4f}", format_count(critical)
        rows.append((label, *cells, f"{law.tokens / critical:.2g}"))
    yield plain_table(("format", "loss", "of it by quantization", "critical tokens", "tokens / critical"), rows)
    yield VALIDITY
    if law.outside:
        yield f"outside of that range: {', '.join(law.outside)}"


def precision_json(name: str, law: PrecisionLaw) -> dict[str, Any]:
    """Return the law's values in nats per token and tokens."""
    formats = {
        label: {"loss": law.plain_loss + law.added_loss(*bits), "added": law.added_loss(*bits),
                "critical_tokens": law.critical_tokens(*bits)}
        for label, bits in FORMATS.items()
    }  # fmt: skip
    return {
        "name": name, "linear_weights": law.weights, "tokens": law.tokens, "block": law.block,
        "loss_without_quantization": law.plain_loss, "formats": formats, "outside": law.outside,
    }  # fmt: skip

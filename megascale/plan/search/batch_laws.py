"""Published laws of the batch size, in tokens: critical batches, best batches, and what a batch costs.

The critical batch is where a smaller batch needs few more tokens and a larger one few fewer steps (McCandlish et al.
2018, equation 2.11):

    S / S_min = 1 + B_crit / B    steps to a loss, over those of the largest batch
    E / E_min = 1 + B / B_crit    tokens to a loss, over those of the smallest batch

The best batch is the one of the lowest loss after a given number of tokens. The laws were fitted with other data,
models and learning rates than those of a new run: each states where it holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from megascale.config.batch_rampup import samples_of_run
from megascale.config.run import RunConfig
from megascale.layout.parameters import parameter_count
from megascale.plan.account.flops import head_flops, token_flops

CRITICAL_EXPONENT = 0.47
"""The critical batch grows with this power of the tokens of a run, whatever its parameters: 0.47 (Zhang et al. 2024),
0.462 (Power Lines, Bergsma et al. 2025).
"""

BEST_EXPONENT = 0.102
"""The best batch grows with this power of the FLOPs of a run (Shuai et al. 2024)."""

LR_EXPONENTS = (0.75, 1.0)
"""The best learning rate grows with a power of the batch in this range (Shuai et al. 2024)."""


@dataclass(frozen=True)
class Training:
    """The variables of the laws. `flops_per_token`: without those of the head. `loss`: in nats per token at the end;
    None: the loss that Hoffmann et al. predict.
    """

    tokens: float
    parameters: float
    flops_per_token: float
    loss: float | None = None

    @property
    def flops(self) -> float:
        return self.tokens * self.flops_per_token

    def after(self, tokens: float) -> Training:
        """The training up to `tokens`, with the predicted loss there."""
        return replace(self, tokens=tokens, loss=None)


@dataclass(frozen=True)
class Law:
    """A law: `batch`, in tokens, of a training; `formula` and `valid`, where it was fitted, for people. `critical`: the
    critical batch, else the best one.
    """

    source: str
    formula: str
    valid: str
    critical: bool
    batch: Callable[[Training], float]


def training_of(config: RunConfig, tokens: float | None = None, loss: float | None = None) -> Training:
    """Describe the training of a configuration. `tokens`: by default of its steps, with their batches."""
    model = config.model
    flops = token_flops(model).full - head_flops(model)
    samples = samples_of_run(config)
    return Training(tokens or float(samples * model.seq_length), parameter_count(model), flops, loss)


def predicted_loss(training: Training) -> float:
    """Predict the loss in nats per token (Hoffmann et al. 2022, approach 3): for compute-optimal models of 70M to 16B
    parameters on MassiveText, of an ordinary batch.
    """
    return 1.69 + 406.4 / training.parameters**0.34 + 410.7 / training.tokens**0.28


def kaplan_critical(training: Training) -> float:
    """The critical batch at the loss of a training (Kaplan et al. 2020, equation 1.4)."""
    loss = predicted_loss(training) if training.loss is None else training.loss
    return 2e8 / float(loss ** (1 / 0.21))


LAWS = (
    Law(
        "Kaplan et al. 2020",
        "2e8 / L^(1 / 0.21)",
        "up to 1.5B parameters, WebText2, 50,257 tokens in the vocabulary",
        True,
        kaplan_critical,
    ),
    Law(
        "DeepSeek LLM 2024",
        "0.292 C^0.3271",
        "C from 1e17 to 2e19 FLOPs without embeddings, tried at 1e20",
        False,
        lambda training: 0.292 * training.flops**0.3271,
    ),
    Law(
        "Step Law, Li et al. 2025",
        "0.58 D^0.571",
        "60M to 1B parameters, up to 100B tokens",
        False,
        lambda training: 0.58 * training.tokens**0.571,
    ),
)


def cost(batch: float, critical: float) -> tuple[float, float]:
    """Return (S / S_min, E / E_min) of a batch, in the unit of the critical one."""
    return 1 + critical / batch, 1 + batch / critical

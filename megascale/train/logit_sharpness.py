"""The sharpness of the loss around the logits of held-out tokens, which rises before training diverges.

    sharpness = 100 (max_d f(z + d) - f(z)) / (1 + f(z))        |d_tj| <= RADIUS (|z_tj| + 1)

f: mean loss of the tokens; z: their logits. It is the sharpness of Keskar et al. (arXiv 1609.04836, equation 4), taken
of logits instead of weights by Lee et al. (arXiv 2405.18710), who read the last token of each sample; here all tokens
of the first validation batch count, the same ones every time. The maximum needs no search (`ops.cross_entropy`): a
measurement is two evaluations of one batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megascale.record.layout import Phase
from megascale.record.metrics import SharpnessMetrics
from megascale.train.evaluate import evaluate
from megascale.train.run import Hook, Run, StepResult
from megascale.train.spike import SpikeMonitor

if TYPE_CHECKING:
    from megascale.train.reporter import Reporter

RADIUS = 5e-4  # of the box around the logits
RISE_FACTOR, WINDOW = 2.0, 20  # an alert: a value this many times the median of the last measurements


def logit_sharpness(run: Run) -> float:
    """Return the sharpness, in percent. A collective of all ranks."""
    loss, worst = (evaluate(run, 1, radius).valid_loss for radius in (0.0, RADIUS))
    return 100 * (worst - loss) / (1 + loss)


class LogitSharpness(Hook):
    """Measures the sharpness every `train.logit_sharpness_every` steps, and writes an alert if it rises."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._monitor = SpikeMonitor("logit_sharpness", RISE_FACTOR, WINDOW)

    def step_ends(self, run: Run, result: StepResult) -> None:
        step = run.progress.step
        if step % run.config.train.logit_sharpness_every:
            return
        with run.mesh.recorder.activity(Phase.EVALUATION):
            sharpness = logit_sharpness(run)
        self._reporter.write(SharpnessMetrics(step, sharpness))
        if alert := self._monitor.add(step, sharpness):
            self._reporter.write(alert)

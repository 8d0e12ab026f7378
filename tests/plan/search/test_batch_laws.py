"""Laws of the batch size against numbers of their papers, and what a batch costs."""

from __future__ import annotations

import pytest

from megascale.plan.search.batch_laws import (
    BEST_EXPONENT,
    CRITICAL_EXPONENT,
    LAWS,
    Training,
    cost,
    kaplan_critical,
    predicted_loss,
    training_of,
)
from tests.runs import GPT, config_of, settings


def test_costs_are_a_hyperbola() -> None:
    """(S / S_min - 1) (E / E_min - 1) = 1, and the critical batch doubles both."""
    assert cost(100, 100) == (2, 2)
    for batch in (1, 30, 100, 5000):
        steps, tokens = cost(batch, 100)
        assert (steps - 1) * (tokens - 1) == pytest.approx(1)


def test_the_critical_batch_of_kaplan_et_al() -> None:
    """A million tokens or two at the losses of large models (their section 5.1)."""
    assert kaplan_critical(Training(1e9, 1e9, 6e9, loss=1.0)) == 2e8
    assert 1e6 < kaplan_critical(Training(1e9, 1e9, 6e9, loss=2.8)) < 2e6


def test_the_predicted_loss_is_that_of_chinchilla() -> None:
    """70B parameters, 1.4T tokens: 1.936 by the formula; more tokens lower it."""
    chinchilla = Training(1.4e12, 70e9, 6 * 70e9)
    assert predicted_loss(chinchilla) == pytest.approx(1.936, abs=0.002)
    assert kaplan_critical(chinchilla) > kaplan_critical(chinchilla.after(1e11))


def test_best_batches_of_two_papers() -> None:
    """DeepSeek LLM trained 7B and 67B parameters on 2T tokens with batches of 2,304 and 4,608 sequences of 4,096."""
    laws = {law.source: law for law in LAWS}
    for parameters, sequences in ((7e9, 2304), (67e9, 4608)):
        batch = laws["DeepSeek LLM 2024"].batch(Training(2e12, parameters, 6 * parameters))
        assert batch == pytest.approx(sequences * 4096, rel=0.1)
    step_law = laws["Step Law, Li et al. 2025"].batch(Training(1e11, 1e9, 6e9))
    assert step_law == pytest.approx(1.107e6, rel=0.01)


def test_exponents_of_scaling() -> None:
    """Shuai et al.: steps and batch, C^0.434 and C^0.102, multiply to the tokens, C^0.536."""
    assert pytest.approx(0.536) == BEST_EXPONENT + 0.434
    assert pytest.approx(0.462, abs=0.01) == CRITICAL_EXPONENT


def test_a_training_has_the_tokens_of_its_steps(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("run")
    config = config_of(settings(GPT, folder, batch__rampup=[2, 2, 12]), folder)
    assert training_of(config).tokens == 16 * (2 + 2 + 4 + 6 + 6 * 8)
    assert training_of(config, 5e9, 2.0) == Training(
        5e9, training_of(config).parameters, training_of(config).flops_per_token, 2.0
    )

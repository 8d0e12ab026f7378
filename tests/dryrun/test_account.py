"""Memory by kind: the code that makes a tensor says what it is for, and in training that costs nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megascale.trace.recorder import Recorder
from tests.runs import LLAMA, config_of, settings

SIZES = LLAMA | {"num_layers": 2, "hidden_size": 64, "ffn_size": 128, "seq_length": 64, "vocab_size": 4096}


def peak(folder: Path, **changes: Any) -> Any:
    """What rank 0 holds when that is most, and before the step."""
    from megascale.dryrun.run import dry_run

    return dry_run(config_of(settings(SIZES, folder, train__precision="bf16", **changes), folder), 0)


@pytest.mark.parametrize("tp", [1, 2])
def test_logits_are_counted_as_such(tp: int, tmp_path: Path) -> None:
    """By a rank of one too, whose groups carry nothing. The peak is in the loss: logits in bf16 and their gradient."""
    found = peak(tmp_path, parallel__tp=tp)
    assert found.peak["logits"] >= 2 * SIZES["seq_length"] * SIZES["vocab_size"] // tp
    assert found.state["logits"] == 0


def test_whole_gradients_are_gradients(tmp_path: Path) -> None:
    """With zero = 2 they exist during a backward only, beside the shards."""
    found = peak(tmp_path, parallel__dp=2, parallel__zero=2, batch__micro=1)
    whole = 2 * found.state["gradients"]  # two ranks have half each
    assert found.peak["gradients"] > found.state["gradients"] + whole / 2


def test_copies_in_8_bits_are_parameters(tmp_path: Path) -> None:
    fp8 = {"train__precision": "fp8", "fp8__recipe": "tensorwise", "fp8__bf16_first": 0, "fp8__bf16_last": 0}
    tree = settings(SIZES, tmp_path, **fp8)
    from megascale.dryrun.run import dry_run

    found = dry_run(config_of(tree, tmp_path), 0)
    h, ffn, heads, kv = 64, 128, LLAMA["num_heads"], LLAMA["num_kv_heads"]
    cast = 2 * (h * (heads + 2 * kv) * (h // heads) + h * h + 3 * h * ffn)
    made = found.peak["parameters"] - found.state["parameters"]
    assert cast <= made <= 2.1 * cast, "in one direction or two, with their scales"


def test_the_optimizer_counts_what_its_actions_make() -> None:
    from megascale.dryrun.account import Accountant, Ledger

    ledger = Ledger()
    with Accountant(ledger):
        with ledger.action("F"):
            kept = torch.zeros(8)
            with ledger.memory("logits"):
                more = torch.zeros(16)
        with ledger.action("update"):
            last = torch.zeros(32)
        sizes = [tensor.nbytes for tensor in (kept, more, last)]
        assert [ledger.account.live[kind] for kind in ("activations", "logits", "optimizer")] == sizes
    assert ledger.kind == "activations"


def test_training_pays_nothing_for_it() -> None:
    recorder = Recorder()
    assert recorder.memory("logits") is recorder.memory("gradients"), "nothing is made"

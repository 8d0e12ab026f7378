"""Memory by kind: the code that allocates a tensor declares the kind, at no cost in training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megascale.record.recorder import Recorder
from tests.runs import LLAMA, config_of, settings

SIZES = LLAMA | {"num_layers": 2, "hidden_size": 64, "ffn_size": 128, "seq_length": 64, "vocab_size": 4096}


def dry_run_of(folder: Path, **changes: Any) -> Any:
    """Dry-run rank 0: bytes by kind at the peak and before the step."""
    from megascale.plan.dryrun.dry_run import dry_run

    return dry_run(config_of(settings(SIZES, folder, train__precision="bf16", **changes), folder), 0)


@pytest.mark.parametrize("tp", [1, 2])
def test_logits_have_a_kind(tp: int, tmp_path: Path) -> None:
    """The peak is in the loss: logits in bf16 and their gradient, also for tp = 1."""
    run = dry_run_of(tmp_path, parallel__tp=tp)
    assert run.peak["logits"] >= 2 * SIZES["seq_length"] * SIZES["vocab_size"] // tp
    assert run.state["logits"] == 0


def test_full_gradients_are_gradients(tmp_path: Path) -> None:
    """With zero = 2 full gradients exist only in the backward, beside the shards."""
    run = dry_run_of(tmp_path, parallel__dp=2, parallel__zero=2, batch__micro=1)
    full = 2 * run.state["gradients"]  # each of two ranks has half
    assert run.peak["gradients"] > run.state["gradients"] + full / 2


def test_fp8_weights_are_parameters(tmp_path: Path) -> None:
    fp8 = {
        "train__precision": "fp8",
        "fp8__recipe": "tensorwise",
        "fp8__first_layers_bf16": 0,
        "fp8__last_layers_bf16": 0,
    }
    tree = settings(SIZES, tmp_path, **fp8)
    from megascale.plan.dryrun.dry_run import dry_run

    run = dry_run(config_of(tree, tmp_path), 0)
    h, ffn, heads, kv = 64, 128, LLAMA["num_heads"], LLAMA["num_kv_heads"]
    fp8_bytes = 2 * (h * (heads + 2 * kv) * (h // heads) + h * h + 3 * h * ffn)
    allocated = run.peak["parameters"] - run.state["parameters"]
    assert fp8_bytes <= allocated <= 2.1 * fp8_bytes, "one copy or two, with scales"


def test_tensors_of_optimizer_actions_have_the_kind_optimizer() -> None:
    from megascale.plan.dryrun.resource_counter import CountingRecorder, ResourceCounterMode

    recorder = CountingRecorder()
    with ResourceCounterMode(recorder):
        with recorder.action("F"):
            activations = torch.zeros(8)
            with recorder.memory_kind("logits"):
                logits = torch.zeros(16)
        with recorder.action("update"):
            update = torch.zeros(32)
        sizes = [tensor.nbytes for tensor in (activations, logits, update)]
        assert [recorder.counts.live_bytes[kind] for kind in ("activations", "logits", "optimizer")] == sizes
    assert recorder.kind == "activations"


def test_training_allocates_nothing_for_kinds() -> None:
    recorder = Recorder()
    assert recorder.memory_kind("logits") is recorder.memory_kind("gradients"), "one shared context"

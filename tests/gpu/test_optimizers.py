"""Every update rule steps on a GPU as on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megascale.catalog.optimizers import OPTIMIZERS
from megascale.config.run import RunConfig
from megascale.core.rank import Rank
from megascale.layout import buckets
from tests.gpu.conftest import Figure
from tests.gpu.machine import curve_on, furthest, run_of, world_of
from tests.runs import LLAMA, config_of, curve_of, settings, train_curve
from tests.worlds import run_world

pytestmark = pytest.mark.gpu(1)

STEPS = 6

TOLERANCES = {"muon": 1e-2, "adamw_8bit": 1e-4, "galore_8bit": 1e-4, "soap": 1e-2}
"""Of the loss. Muon multiplies in bf16; a number may be rounded to another of the 256 codes; rounding decides SOAP's
first bases.
"""


@pytest.mark.parametrize("rule", OPTIMIZERS.names())
def test_every_rule_steps_as_on_a_cpu(rule: str, tmp_path: Path, figure: Figure) -> None:
    model = LLAMA | {"num_layers": 2, "hidden_size": 64, "ffn_size": 96, "vocab_size": 128}
    keys = {"optimizer__name": rule, "optimizer__lr": 1e-3, "train__steps": STEPS}
    keys |= {"optimizer__options": {"rank": 16}} if rule == "compact" else {}
    config = config_of(settings(model, tmp_path, **keys), tmp_path)
    (ours,), (expected,) = world_of(1, curve_on, config, STEPS), run_world(1, train_curve, config, STEPS)
    difference = furthest([(loss,) for loss, _ in ours], [(loss,) for loss, _ in expected])
    figure("difference of the loss", difference)
    assert difference < TOLERANCES.get(rule, 1e-9)


def are_rounded(rank: Rank, config: RunConfig) -> list[bool]:
    """Train; say of every bucket whether its weights are the master weights, rounded to nearest."""
    run = run_of(rank, config)
    curve_of(run, STEPS)
    return [torch.equal(s.bucket.shard_weights, s.master.to(torch.bfloat16)) for s in run.optimizer.shards]


@pytest.mark.parametrize("rule", ["adamw", "lion"])
def test_weights_in_bf16_are_the_rounded_master_weights(rule: str, tmp_path: Path) -> None:
    """Rounded by the kernel of AdamW, or by a copy."""
    tree = settings(LLAMA, tmp_path, optimizer__name=rule, train__precision="bf16", train__steps=STEPS)
    (rounded,) = world_of(1, are_rounded, config_of(tree, tmp_path))
    assert rounded and all(rounded)


def curve_in_sub_groups(rank: Rank, config: RunConfig) -> list[tuple[float, float]]:
    """Train with several sub-groups in a bucket."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "SUB_GROUP", 20_032)
        return curve_on(rank, config, STEPS)


@pytest.mark.parametrize("stride", [0, 1, 2])
@pytest.mark.parametrize("rule", ["adamw", "lion"])
def test_state_in_host_memory_is_updated_as_on_the_gpu(rule: str, stride: int, tmp_path: Path, figure: Figure) -> None:
    """By the processor's kernel, the GPU's, or both by turns; copies and updates overlap."""
    keys = {"optimizer__name": rule, "optimizer__lr": 1e-3, "train__precision": "bf16", "train__steps": STEPS}
    keys |= {"model__hidden_size": 256, "model__vocab_size": 1024, "model__ffn_size": 512}
    in_host = keys | {"optimizer__offload": "host", "optimizer__offload_stride": stride}
    ours, theirs = (
        world_of(1, curve_in_sub_groups, config_of(settings(LLAMA, tmp_path, **given), tmp_path))[0]
        for given in (in_host, keys)
    )
    difference = furthest(ours, theirs)
    figure("difference of loss and norm", difference)
    assert difference < (1e-2 if rule == "lion" else 2e-3)

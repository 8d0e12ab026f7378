"""Owners of whole matrices: balanced work, few bytes, every matrix once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megascale.config.run import RunConfig
from megascale.layout.owners import update_cost
from megascale.layout.topology import Coord, topology_of
from megascale.plan.account.stage_matrices import sent_elements, stage_places
from megascale.plan.account.state_bytes import state_bytes
from megascale.plan.account.traffic import step_traffic
from tests.marks import only_quick
from tests.optim.test_expert_matrices import LAMB, LAYOUTS, MUON, expert_config
from tests.plan.account.test_against_dry_run import sent_by
from tests.runs import config_of, settings


def llama(folder: Path, **keys: Any) -> RunConfig:
    """Return Llama 3 8B in bf16 by Muon."""
    tree = settings({"preset": "llama3-8b"}, folder, train__precision="bf16", optimizer__name="muon", **keys)
    return config_of(tree, folder)


@pytest.mark.parametrize(("tp", "dp"), [(1, 2), (1, 4), (1, 8), (2, 4)])
def test_muon_sends_little_more_than_adamw(tp: int, dp: int, tmp_path: Path) -> None:
    """At most 1.25 times the bytes that ZeRO-1 sends over dp: gradients in fp32 and weights in bf16."""
    config = llama(tmp_path, parallel__tp=tp, parallel__dp=dp)
    stage, topology = (
        stage_places(config.model, config.parallel, config.overlap, config.train, config.optimizer, 0),
        topology_of(config.parallel),
    )
    adamw = (dp - 1) / dp * sum(layout.numel for layout in stage.layouts) * (4 + 2)
    sent = []
    for rank in ((t, d) for t in range(tp) for d in range(dp)):
        both = [
            sent_elements(places, layout, topology, rank)
            for layout, places in zip(stage.layouts, stage.places, strict=True)
        ]
        sent.append(4 * sum(there["dp"] + back["dp"] for there, back in both))
    assert max(sent) < 0.15 * adamw


@pytest.mark.parametrize(("tp", "dp"), [(1, 2), (2, 4), (1, 16)])
def test_work_is_balanced(tp: int, dp: int, tmp_path: Path) -> None:
    config = llama(tmp_path, parallel__tp=tp, parallel__dp=dp, batch__global=16)
    loads = Counter[tuple[int | None, int | None]]()
    names = []
    for places in stage_places(config.model, config.parallel, config.overlap, config.train, config.optimizer, 0).places:
        for place in places:
            loads[place.tp_owner, place.dp_owner] += update_cost(place.group, place.shape)
            names.append(place.tensor.name)
    assert len(loads) == tp * dp and max(loads.values()) < 1.05 * loads.total() / (tp * dp)
    assert len(names) == len(set(names)) == 32 * 7


def test_state_and_messages_of_a_configuration(tmp_path: Path) -> None:
    """Muon has half of AdamW's state for matrices of blocks; a rank without peers sends nothing."""
    config = llama(tmp_path)
    adamw = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"name": "adamw"})})
    blocks = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14336 * 4096)
    assert state_bytes(adamw, 0).optimizer - state_bytes(config, 0).optimizer == 4 * blocks
    assert step_traffic(config, Coord()) == {}


ADAFACTOR = {"name": "adafactor", "groups": [{"params": ["*.down.weight"], "name": "soap"}]}


@pytest.mark.parametrize(
    "rule", only_quick([MUON, LAMB, ADAFACTOR], ADAFACTOR), ids=["muon", "lamb", "adafactor and soap"]
)
@pytest.mark.parametrize("layout", only_quick(LAYOUTS, "tp2 sp dp2 ep4"))
def test_messages_and_state_of_ranks_with_experts(layout: str, rule: dict[str, Any], tmp_path: Path) -> None:
    """Those of a dry run, whose fullest rank has the state that a plan counts."""
    from megascale.plan.dryrun.dry_run import dry_run

    few = {"train__precision": "bf16", "batch__global": 2 * LAYOUTS[layout]["dp"]}
    config = expert_config(tmp_path, rule, layout, **few)
    stages = dict[int, int]()
    for rank in range(config.world_size):
        dry = dry_run(config, rank)
        assert step_traffic(config, dry.coord) == sent_by(dry)
        stages[dry.coord.pp] = max(stages.get(dry.coord.pp, 0), dry.state["optimizer"])
    assert stages == {stage: state_bytes(config, stage).optimizer for stage in stages}

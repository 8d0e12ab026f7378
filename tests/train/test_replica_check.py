"""Replicas that drift: one flipped bit on one rank is found, with its parameter and rank."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megascale.core.errors import Exit
from megascale.core.rank import Rank
from megascale.layout import buckets
from megascale.train.replica_check import checksum, describe_reports
from tests.jobs import Job, job_config
from tests.marks import only_quick
from tests.recorded_events import recorded_events
from tests.runs import GPT, LLAMA, config_of, settings
from tests.worlds import run_world

FP8 = {"train__precision": "fp8", "fp8__recipe": "tensorwise"}
OFFLOAD = {"optimizer__offload": "host", "optimizer__offload_stride": 2}
WIDE = LLAMA | {"hidden_size": 64, "ffn_size": 96}
EXPERTS = LLAMA | {"num_layers": 2, "experts": 4, "experts_per_token": 2, "expert_ffn_size": 24}

LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "zero0 fp32": (LLAMA, {"parallel__dp": 2, "parallel__zero": 0, "train__precision": "fp32"}),
    "zero0 bf16": (LLAMA, {"parallel__dp": 2, "parallel__zero": 0, "train__precision": "bf16"}),
    "zero1 fp32": (LLAMA, {"parallel__dp": 2, "parallel__zero": 1, "train__precision": "fp32"}),
    "zero2 bf16": (LLAMA, {"parallel__dp": 2, "parallel__zero": 2, "train__precision": "bf16"}),
    "tp2 dp2": (LLAMA, {"parallel__tp": 2, "parallel__dp": 2, "train__precision": "bf16"}),
    "tp2 sp dp2 zero3 bf16": (
        LLAMA,
        {
            "parallel__tp": 2, "parallel__sp": True, "parallel__dp": 2, "parallel__zero": 3, "train__precision": "bf16",
        },
    ),
    "tied pp2 dp2 zero3": (GPT, {"parallel__pp": 2, "parallel__dp": 2, "parallel__zero": 3}),
    "tp2 sp dp2 zero1": (GPT, {"parallel__tp": 2, "parallel__sp": True, "parallel__dp": 2, "parallel__zero": 1}),
    "tp2 sp pp2": (LLAMA, {"parallel__tp": 2, "parallel__sp": True, "parallel__pp": 2, "parallel__vpp": 2}),
    "tied pp2 dp2": (GPT, {"parallel__pp": 2, "parallel__dp": 2, "train__precision": "bf16"}),
    "fp8 dp2": (WIDE, {"parallel__dp": 2, "parallel__zero": 0} | FP8),
    "state on the host, zero0": (
        LLAMA, {"parallel__dp": 2, "parallel__zero": 0, "train__precision": "bf16", **OFFLOAD},
    ),
    "state on the host, fp8 tp2 sp dp2": (
        WIDE, {"parallel__tp": 2, "parallel__sp": True, "parallel__dp": 2, **FP8, **OFFLOAD},
    ),
    "state on the host, tied pp2 dp2": (GPT, {"parallel__pp": 2, "parallel__dp": 2, **OFFLOAD}),
    "cp2 zero0": (LLAMA, {"parallel__cp": 2, "parallel__zero": 0}),
    "cp2 tp2 sp zero1": (LLAMA, {"parallel__cp": 2, "parallel__tp": 2, "parallel__sp": True}),
    "lamb tp2 dp2": (LLAMA, {"parallel__tp": 2, "parallel__dp": 2, "optimizer__name": "lamb"}),
    "muon dp4 ep2 zero0": (
        EXPERTS, {"parallel__dp": 4, "parallel__ep": 2, "parallel__zero": 0, "optimizer__name": "muon"},
    ),
    "dp4 in twos zero3, state over all": (
        GPT,
        {
            "parallel__dp": 4, "parallel__dp_shard": 2, "parallel__zero": 3, "parallel__state_shard": "all",
            "train__precision": "bf16",
        },
    ),
    "muon dp4 in twos, ep2": (
        EXPERTS, {"parallel__dp": 4, "parallel__dp_shard": 2, "parallel__ep": 2, "optimizer__name": "muon"},
    ),
    "muon tp2 sp dp2 ep4": (
        EXPERTS,
        {"parallel__tp": 2, "parallel__sp": True, "parallel__dp": 2, "parallel__ep": 4, "optimizer__name": "muon"},
    ),
}  # fmt: skip


def flip(values: torch.Tensor, element: int, bit: int) -> None:
    """Flip one bit of an element of a flat tensor."""
    size = 8 * values.element_size()
    bits = values.view({16: torch.int16, 32: torch.int32, 64: torch.int64}[size])
    bits[element] ^= (1 << bit) - (1 << size if bit == size - 1 else 0)  # the sign bit is negative


def find(rank: Rank, config: Any) -> list[tuple[str, str, list[int], str]]:
    """Train two steps, check; then, for every kind of copy, flip the lowest bit of its last element on the group's last
    rank, check, and flip it back. Returns (group, name, ranks, message) for each.
    """
    from megascale.core.errors import ReplicasDifferError
    from megascale.train.replica_check import ReplicaCheck, replicated_values
    from megascale.train.step import train_step
    from tests.runs import build_run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "SUB_GROUP", 1024)
        run = build_run(rank, config)
    for _ in range(2):
        train_step(run, run.train_loader.batch(run.progress.samples))
    check = ReplicaCheck()
    check.check(run)
    copies = list(replicated_values(run))
    kinds = {}
    for copy in (copy for copy in copies if copy.parts):  # a shard may have padding alone
        name, _, stop = copy.parts[-1]
        kinds.setdefault((copy.group.name, name.rpartition("(")[2] if "(" in name else ""), (copy, name, stop))
    everyone = sorted(
        {tuple(kind) for kinds in run.mesh.world.control.all_gather(list(kinds), "kinds") for kind in kinds}
    )
    found = []
    for kind in everyone:
        copy, name, stop = kinds.get(kind, (None, "", 0))
        victim = copy is not None and rank.rank == copy.group.ranks[-1]
        if victim:
            flip(copy.values, stop - 1, 0)
        try:
            check.check(run)
            text = "equal"
        except ReplicasDifferError as error:
            text = str(error)
        if victim:
            flip(copy.values, stop - 1, 0)
        found.append((copy.group.name if victim else "", name, list(copy.group.ranks) if victim else [], text))
    check.check(run)
    return found


@pytest.mark.parametrize(
    "layout", only_quick(LAYOUTS, "zero0 bf16", "state on the host, tied pp2 dp2", "muon dp4 ep2 zero0")
)
def test_one_flipped_bit_is_named(layout: str, tmp_path: Path) -> None:
    model, changes = LAYOUTS[layout]
    config = config_of(settings(model, tmp_path, batch__global=4, **changes), tmp_path)
    ranks = run_world(config.world_size, find, config)
    assert ranks[0], "the layout has replicas"
    for kind in zip(*ranks, strict=True):
        (message,) = {text for *_, text in kind}
        assert message.startswith("step 2: replicas differ"), message
        for group, name, members, text in kind:
            if group:
                assert f"  {name}, a copy on each rank of {group}: " in text
                odd = members if len(members) == 2 else members[-1:]  # of two, nobody knows who is right
                assert all(f"rank {member} (" in text for member in odd)
                assert "continue from a checkpoint of a step up to step 2, where they were equal" in text


def drift(rank: Rank, config: Any) -> tuple[str, tuple[int, ...]]:
    from megascale.core.errors import ReplicasDifferError
    from megascale.train.replica_check import ReplicaCheck
    from tests.runs import build_run

    run = build_run(rank, config)
    if rank.rank == 2:
        flip(run.buffers.buckets[0].parameters["layers.1.mlp.down.weight"].data.view(-1), 5, 3)
    try:
        ReplicaCheck().check(run)
    except ReplicasDifferError as error:
        return str(error), error.ranks
    return "", ()


def test_of_three_replicas_the_odd_one_is_named(tmp_path: Path) -> None:
    more = {"parallel__dp": 3, "parallel__zero": 0, "batch__global": 6, "train__precision": "fp32"}
    texts, ranks = zip(*run_world(3, drift, config_of(settings(LLAMA, tmp_path, **more), tmp_path)), strict=True)
    assert len(set(texts)) == 1 and set(ranks) == {(2,)}
    assert "layers.1.mlp.down.weight, a copy on each rank of dp: rank 2 (" in texts[0]
    assert "differs; 2 other ranks are equal" in texts[0] and "rank 0" not in texts[0]
    assert texts[0].count("a copy on each rank") == 1, "no other parameter is named"


def calls(rank: Rank, configs: list[Any]) -> list[tuple[int, list[str]]]:
    """Train four steps by the loop. Returns the communications of a run, and the labels of those of the checks."""
    from megascale.train.loop import train
    from megascale.train.reporter import Reporter
    from tests.runs import builds

    counts = []
    for run in builds(rank, configs):
        before = len(recorded_events(run.mesh.recorder))
        train(run, Reporter(run.config, run.device, None, [], run.mesh.recorder))
        events = recorded_events(run.mesh.recorder)[before:]
        counts.append((len(events), [event.group for event in events if event.label == "replicas"]))
    return counts


def test_off_sends_nothing_and_on_sends_an_all_reduce_for_each_axis(tmp_path: Path) -> None:
    base = {"parallel__tp": 2, "parallel__dp": 2, "train__steps": 4, "train__precision": "fp32", "batch__global": 2}
    configs = [
        config_of(settings(LLAMA, tmp_path, **base, train__check_replicas_every=every), tmp_path) for every in (0, 2, 0)
    ]
    for off, on, again in run_world(4, calls, configs):
        assert off[1] == again[1] == [] and off[0] == again[0]
        assert on[1] == ["dp", "tp", "world"] * 2, "two checks"


@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]), st.integers(1, 300), st.data(),
)  # fmt: skip
def test_every_single_bit_changes_the_checksum(dtype: torch.dtype, size: int, data: st.DataObject) -> None:
    values = torch.randn(size, dtype=torch.float64).to(dtype)
    kept, before = values.clone(), int(checksum(values))
    assert torch.equal(values, kept), "the values are only read"
    bit = data.draw(st.integers(0, 8 * values.element_size() - 1))
    flip(values, data.draw(st.integers(0, size - 1)), bit)
    assert int(checksum(values)) != before


def test_the_order_of_elements_and_chunks_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    from megascale.train import replica_check

    values = torch.randn(1000)
    whole = int(checksum(values))
    assert int(checksum(values.flip(0))) != whole
    monkeypatch.setattr(replica_check, "CHUNK", 7)
    assert int(checksum(values)) == whole
    values[3] = -values[3]
    assert int(checksum(values)) != whole
    assert int(checksum(torch.full((4,), math.nan))) == int(checksum(torch.full((4,), math.nan))), "NaN equals itself"


def test_many_parameters_are_counted() -> None:
    found = [["dp", [0, 1], f"layers.{n}", ""] for n in range(20)]
    reports = [{"host": "a", "found": [[*f[:3], str(rank)] for f in found]} for rank in (0, 1)]
    text, ranks = describe_reports(reports)
    assert ranks == [0, 1]
    assert text.count("rank 0 (a), rank 1 (a) differ; which is right is unknown") == 8 and "and 12 more" in text


PLANTED = """
import os
if os.environ.get("RANK") == "1":
    from megascale.train import loop
    step = loop.train_step
    def planted(run, batch):
        result = step(run, batch)
        if run.progress.step == 3:
            import torch
            run.buffers.buckets[0].parameters["layers.0.mlp.up.weight"].data.view(torch.int32)[0, 0] ^= 1
        return result
    loop.train_step = planted
"""


@pytest.mark.slow
@pytest.mark.parametrize("every", [2, 0])
def test_a_job_whose_replicas_drift_is_not_requeued(every: int, tmp_path: Path) -> None:
    """Unplugged (0), the job ends well with two models."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(PLANTED)
    more = {"parallel__dp": 2, "parallel__zero": 0, "train__precision": "fp32", "train__check_replicas_every": every}
    job = Job(job_config(tmp_path, GPT, **more), env={"PYTHONPATH": str(tmp_path / "site")})
    status, _, err = job.end()
    if not every:
        assert status == Exit.OK, err
        return
    assert status == Exit.DO_NOT_REQUEUE, err
    assert "step 4: replicas differ" in err and "layers.0.mlp.up.weight" in err
    assert "up to step 2, where they were equal" in err

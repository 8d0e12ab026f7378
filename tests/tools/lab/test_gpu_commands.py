"""The lab's commands for one GPU, on a CPU."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch

from lab.__main__ import main
from lab.commands import device_waits, spin_gemm
from lab.commands.fake_rank import LocalTransport
from lab.spinning import Spin
from megascale.bench.gemm import GemmShape
from megascale.device import Device, detect_device

TINY = (
    "model.num_layers=4", "model.hidden_size=64", "model.num_heads=8", "model.seq_length=32", "model.vocab_size=512",
    "model.ffn_size=128",
)  # fmt: skip


def figures(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    return json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]


def test_a_rank_of_a_job_runs_without_its_peers(capsys: pytest.CaptureFixture[str]) -> None:
    """The second stage of two, with tensor and data parallelism: a loss, an update, and no peer."""
    layout = ("parallel.tp=2", "parallel.pp=2", "parallel.vpp=2")
    words = ["--config", "configs/gpu/gpt3-175b.toml", "--ranks", "16", "--rank", "2", "--micro-batches", "2"]
    assert main(["fake-rank", *words, "--device", "cpu", *layout, *TINY]) == 0
    found = figures(capsys)
    host, device = (found[f"micro-batch 1: {who}, ms a layer and micro-batch"] for who in ("host", "device"))
    assert isinstance(host, float) and isinstance(device, float) and host > 0 and device > 0
    assert any(" x aten::" in name for name in found)


def test_collectives_without_peers_leave_finite_values() -> None:
    whole = torch.full((6,), float("nan"))
    part = whole[2:4]
    part.copy_(torch.tensor([1.0, 2.0]))
    LocalTransport().all_gather(whole, part)
    assert whole.tolist() == [1.0, 2.0] * 3
    LocalTransport().reduce_scatter(part, torch.arange(6.0))
    assert part.tolist() == [0.0, 1.0]


def test_every_call_is_possible_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_waits, "SHAPES", ((256, 256, 256),))
    found = device_waits.calls(detect_device(allow_gpu=False))
    assert len(found) == 11
    assert all(value.startswith("returned") for name, value in found.items() if name != "Triton kernel"), found


def test_the_settings_are_measured_in_processes_of_their_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_waits, "SETTINGS", {"32 queues": {}, "no such setting": {}})
    assert main(["device-waits", "--device", "cpu"]) == 0
    assert figures(capsys) == {"failed": "no such setting: status 2"}


def test_gemms_beside_spinning_blocks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those with a carve-out have a run's, and those without it none."""
    left = [0]

    def leave(device: Device, count: int) -> Callable[[], None]:
        left.append(count)
        return left.pop

    beside = list[tuple[int, int]]()
    monkeypatch.setattr(Device, "leave_sms", leave)
    monkeypatch.setattr(Spin, "start", lambda spin, blocks, seconds: beside.append((blocks, left[-1])))
    monkeypatch.setattr(spin_gemm, "SHAPES", (GemmShape(1024, 1024, 1024),))
    assert main(["spin-gemm", "--device", "cpu"]) == 0
    assert len(figures(capsys)) == 2 * len(spin_gemm.BLOCKS)
    assert beside == [(blocks, out) for blocks in spin_gemm.BLOCKS for out in (0, blocks)] and left == [0]


def test_the_size_of_the_job_must_be_given() -> None:
    with pytest.raises(SystemExit):
        main(["fake-rank", "--config", "configs/gpu/gpt3-175b.toml"])

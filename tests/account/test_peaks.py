"""What devices can do at most, against their makers' data sheets."""

from __future__ import annotations

import pytest

from megascale.account.peaks import ACCELERATORS, find, stated_peak

# (driver's name, format): dense TFLOP/s of the data sheet. NVIDIA states Hopper's and Blackwell's with sparsity, which
# is twice this. An MI250X reports itself as two devices: its 383 are 191.5 for each, which is what a rank has.
DATA_SHEETS = {
    ("Tesla V100-SXM2-32GB", "fp16"): 125,
    ("Tesla V100-PCIE-16GB", "fp16"): 112,
    ("NVIDIA A100-SXM4-80GB", "bf16"): 312,
    ("NVIDIA A100 80GB PCIe", "bf16"): 312,
    ("NVIDIA H100 80GB HBM3", "bf16"): 989.4,
    ("NVIDIA H100 80GB HBM3", "fp8"): 1978.9,
    ("NVIDIA H100 PCIe", "bf16"): 756,
    ("NVIDIA H100 NVL", "bf16"): 1671 / 2,
    ("NVIDIA H200", "bf16"): 989.4,
    ("NVIDIA H200", "fp8"): 1978.9,
    ("NVIDIA H200 NVL", "fp8"): 3341 / 2,
    ("NVIDIA B200", "bf16"): 2250,
    ("NVIDIA B200", "fp8"): 4500,
    ("NVIDIA GB200", "bf16"): 10_000 / 2 / 2,  # of a superchip with two
    ("NVIDIA GB200", "fp8"): 20_000 / 2 / 2,
    ("NVIDIA B300 SXM6 AC", "bf16"): 36_000 / 8 / 2,  # of a board with eight
    ("NVIDIA B300 SXM6 AC", "fp8"): 72_000 / 8 / 2,
    ("NVIDIA GB300", "bf16"): 360_000 / 72 / 2,  # of a rack
    ("NVIDIA GB300", "fp8"): 720_000 / 72 / 2,
    ("AMD Instinct MI250X", "bf16"): 383.0 / 2,
    ("AMD Instinct MI300X", "bf16"): 1307.4,
    ("AMD Instinct MI300X", "fp8"): 2614.9,
}


@pytest.mark.parametrize(("device", "number_format"), DATA_SHEETS, ids=" ".join)
def test_peaks_are_those_of_the_data_sheets(device: str, number_format: str) -> None:
    peak = stated_peak(device, number_format)
    assert peak is not None
    assert peak.flops == pytest.approx(DATA_SHEETS[device, number_format] * 1e12, rel=1e-6)


def test_every_accelerator_is_compared() -> None:
    compared = {found.name for device, _ in DATA_SHEETS if (found := find(device))}
    assert compared == {accelerator.name for accelerator in ACCELERATORS}


@pytest.mark.parametrize("accelerator", ACCELERATORS, ids=lambda a: a.name)
def test_fewer_bits_are_never_slower(accelerator) -> None:
    widths = ["fp64", "fp32", "tf32", "fp16", "fp8"]
    peaks = [accelerator.peak[w] for w in widths if w in accelerator.peak]
    assert peaks == sorted(peaks)
    assert accelerator.peak.get("bf16") in (None, accelerator.peak["fp16"])


@pytest.mark.parametrize(
    "device",
    ["NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA H800", "NVIDIA GH200 480GB", "Tesla V100S-PCIE-32GB", "A100M"],
)
def test_the_peak_of_a_slice_or_a_relative_is_not_guessed(device: str) -> None:
    assert find(device) is None


def test_a_format_that_a_device_lacks_has_no_peak() -> None:
    assert stated_peak("Tesla V100-SXM2-32GB", "bf16") is None
    assert stated_peak("NVIDIA A100-SXM4-80GB", "fp8") is None


def test_the_source_names_device_and_format() -> None:
    peak = stated_peak("NVIDIA H100 80GB HBM3", "fp8")
    assert peak is not None and peak.source == "H100 fp8, stated"

"""Peak FLOP/s against the makers' data sheets."""

from __future__ import annotations

import pytest

from megascale.catalog.accelerators import ACCELERATORS, find_accelerator, stated_peak

# (driver's name, dtype): dense TFLOP/s of the data sheet. NVIDIA states Hopper and Blackwell with sparsity, twice the
# dense rate. An MI250X is two devices, with a rank on 191.5 of the stated 383.
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
    ("NVIDIA GB200", "bf16"): 10_000 / 2 / 2,  # a superchip has two
    ("NVIDIA GB200", "fp8"): 20_000 / 2 / 2,
    ("NVIDIA B300 SXM6 AC", "bf16"): 36_000 / 8 / 2,  # a board has eight
    ("NVIDIA B300 SXM6 AC", "fp8"): 72_000 / 8 / 2,
    ("NVIDIA GB300", "bf16"): 360_000 / 72 / 2,  # a rack has 72
    ("NVIDIA GB300", "fp8"): 720_000 / 72 / 2,
    ("AMD Instinct MI250X", "bf16"): 383.0 / 2,
    ("AMD Instinct MI300X", "bf16"): 1307.4,
    ("AMD Instinct MI300X", "fp8"): 2614.9,
}


@pytest.mark.parametrize(("device", "dtype"), DATA_SHEETS, ids=" ".join)
def test_peaks_equal_the_data_sheets(device: str, dtype: str) -> None:
    peak = stated_peak(device, dtype)
    assert peak is not None
    assert peak.flops == pytest.approx(DATA_SHEETS[device, dtype] * 1e12, rel=1e-6)


def test_every_accelerator_is_compared() -> None:
    compared = {accelerator.name for device, _ in DATA_SHEETS if (accelerator := find_accelerator(device))}
    assert compared == {accelerator.name for accelerator in ACCELERATORS}


@pytest.mark.parametrize("accelerator", ACCELERATORS, ids=lambda a: a.name)
def test_narrower_dtypes_are_never_slower(accelerator) -> None:
    widths = ["fp64", "fp32", "tf32", "fp16", "fp8"]
    peaks = [accelerator.peak[w] for w in widths if w in accelerator.peak]
    assert peaks == sorted(peaks)
    assert accelerator.peak.get("bf16") in (None, accelerator.peak["fp16"])


@pytest.mark.parametrize(
    "device",
    ["NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA H800", "NVIDIA GH200 480GB", "Tesla V100S-PCIE-32GB", "A100M"],
)
def test_mig_slices_and_related_boards_have_no_peak(device: str) -> None:
    assert find_accelerator(device) is None


def test_a_missing_dtype_has_no_peak() -> None:
    assert stated_peak("Tesla V100-SXM2-32GB", "bf16") is None
    assert stated_peak("NVIDIA A100-SXM4-80GB", "fp8") is None


def test_the_source_names_device_and_dtype() -> None:
    peak = stated_peak("NVIDIA H100 80GB HBM3", "fp8")
    assert peak is not None and peak.source == "H100 fp8, stated"

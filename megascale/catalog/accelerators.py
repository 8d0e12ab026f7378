"""Peak FLOP/s of accelerators by dtype, as stated by their makers for dense GEMMs without sparsity."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Accelerator:
    """An accelerator. `name`: words of the device name reported by the driver. `peak`: FLOP/s by dtype; with nvfp4 its
    tensor cores take scales of blocks of a row, those of MXFP8 too.
    """

    name: str
    peak: dict[str, float]


def _peaks(**teraflops: float) -> dict[str, float]:
    return {dtype: value * 1e12 for dtype, value in teraflops.items()}


HOPPER_SXM = _peaks(fp64=66.9, fp32=66.9, tf32=494.7, fp16=989.4, bf16=989.4, fp8=1978.9)
HOPPER_NVL = _peaks(fp64=60, fp32=60, tf32=417.5, fp16=835.5, bf16=835.5, fp8=1670.5)

# the first match counts, so special boards come before their family
ACCELERATORS = (
    Accelerator("V100 PCIe", _peaks(fp64=7, fp32=14, fp16=112)),
    Accelerator("V100", _peaks(fp64=7.8, fp32=15.7, fp16=125)),
    Accelerator("A100", _peaks(fp64=19.5, fp32=19.5, tf32=156, fp16=312, bf16=312)),
    Accelerator("H100 PCIe", _peaks(fp64=51, fp32=51, tf32=378, fp16=756, bf16=756, fp8=1513)),
    Accelerator("H100 NVL", HOPPER_NVL),
    Accelerator("H200 NVL", HOPPER_NVL),
    Accelerator("H100", HOPPER_SXM),
    Accelerator("H200", HOPPER_SXM),
    Accelerator("B200", _peaks(fp64=37, fp32=75, tf32=1125, fp16=2250, bf16=2250, fp8=4500, nvfp4=9000)),
    Accelerator("GB200", _peaks(fp64=40, fp32=80, tf32=1250, fp16=2500, bf16=2500, fp8=5000, nvfp4=10_000)),
    Accelerator("B300", _peaks(fp64=1.2, fp32=75, tf32=1125, fp16=2250, bf16=2250, fp8=4500, nvfp4=13_500)),
    Accelerator("GB300", _peaks(fp64=1.3, fp32=80, tf32=1250, fp16=2500, bf16=2500, fp8=5000, nvfp4=15_000)),
    # one MI250X is two devices (GCDs); the peaks are of one
    Accelerator("MI250X", _peaks(fp64=47.9, fp32=47.9, fp16=191.5, bf16=191.5)),
    Accelerator("MI300X", _peaks(fp64=163.4, fp32=163.4, tf32=653.7, fp16=1307.4, bf16=1307.4, fp8=2614.9)),
)


@dataclass(frozen=True)
class Peak:
    """The denominator of MFU: FLOP/s of one device. `source`: their origin, as a text for users."""

    flops: float
    source: str


def find_accelerator(device_name: str) -> Accelerator | None:
    """Find the accelerator of a driver's device name; None for an unlisted device or a MIG slice."""
    words = set(device_name.upper().replace("-", " ").split())
    matches = (accelerator for accelerator in ACCELERATORS if words.issuperset(accelerator.name.upper().split()))
    return None if "MIG" in words else next(matches, None)


def stated_peak(device_name: str, dtype: str) -> Peak | None:
    """Find the stated peak of a device in `dtype` (fp64, fp32, bf16, fp8); None if unknown."""
    accelerator = find_accelerator(device_name)
    if accelerator is None or dtype not in accelerator.peak:
        return None
    return Peak(accelerator.peak[dtype], f"{accelerator.name} {dtype}, stated")

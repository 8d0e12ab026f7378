"""Kernel times: no faster than the device, and slower for shapes with idle multiprocessors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.config.sparse_pattern import SparsePattern
from megascale.plan.simulate import profiles
from megascale.plan.simulate.gemm_time import KernelTimes, shape_share
from megascale.plan.simulate.profiles import AttentionShares, Cost

SIZES = st.integers(1, 40_000)


@given(SIZES, SIZES, SIZES, st.sampled_from([80, 108, 132]))
def test_a_share_is_at_most_1(m: int, n: int, k: int, units: int) -> None:
    assert 0 < shape_share(m, n, k, units) <= 1


def test_large_gemms_reach_the_rate_and_small_ones_do_not() -> None:
    assert shape_share(8192, 8192, 8192, 108) > 0.9
    assert shape_share(2048, 12_288, 12_288, 108) > 0.85
    assert shape_share(2048, 1536, 128, 108) < 0.5  # short k
    assert shape_share(64, 64, 4096, 108) < 0.1  # one tile


@given(st.integers(1, 6), st.integers(1, 6), st.integers(6, 14))
def test_a_longer_k_has_no_lower_rate(a: int, b: int, c: int) -> None:
    m, n = 256 * a, 256 * b
    assert shape_share(m, n, 2 << c, 108) >= shape_share(m, n, 1 << c, 108) - 1e-9


def test_a_gemm_is_bounded_by_memory_bandwidth() -> None:
    hardware = profiles.hardware("a100-80g")
    kernels = KernelTimes(hardware, profiles.stack("megascale"), "bf16", 2)
    thin = kernels.gemm(1, 32_768, 32_768)
    assert thin >= 2 * 32_768**2 / hardware.device.bandwidth
    flops = 2 * 8192**3
    assert flops / 312e12 < kernels.gemm(8192, 8192, 8192) < 2 * flops / 312e12
    assert kernels.gemm(0, 8, 8) == 0.0


def test_batched_gemms_fill_a_device() -> None:
    kernels = KernelTimes(profiles.hardware("a100-80g"), profiles.stack("megascale"), "bf16", 2)
    one, many = kernels.gemm(256, 256, 4096), kernels.gemm(256, 256, 4096, count=108)
    assert one < many < 60 * one  # one GEMM leaves most multiprocessors idle
    assert kernels.gemm(4096, 4096, 4096, count=8) == pytest.approx(8 * kernels.gemm(4096, 4096, 4096), rel=0.1)
    thin = kernels.gemm(2048, 2048, 16, count=64)  # bound by the write of the results
    assert thin >= 64 * 2048**2 * 2 / (2.039e12 * kernels.hardware.attained.memory)


def test_windowed_attention_takes_its_share_of_the_scores() -> None:
    kernels = KernelTimes(profiles.hardware("a100-80g"), profiles.stack("megascale"), "bf16", 2)
    full, windowed = kernels.attention(16, 2048, None, 128), kernels.attention(16, 2048, 512, 128)
    flops = 2 * 2 * 16 * 2048 * (2048 / 2) * 128
    assert full[0] == pytest.approx(flops / (312e12 * 0.6) * kernels.stack.attained.slowdown)
    assert full[1] == pytest.approx(2.5 * full[0] * 0.6 / 0.5)
    assert windowed[0] == pytest.approx(full[0] * (512 - 512**2 / 4096) / 1024)


def test_sparse_attention_takes_its_share_of_the_scores() -> None:
    kernels, pattern = (
        KernelTimes(profiles.hardware("a100-80g"), profiles.stack("megascale"), "bf16", 2),
        SparsePattern(4, 8),
    )
    full, sparse = kernels.attention(16, 2048, None, 128), kernels.attention(16, 2048, pattern, 128)
    assert sparse[0] == pytest.approx(full[0] * pattern.count_scores(2048)[1] / (2048**2 / 2))


def test_gemm_rates_by_year_of_the_libraries() -> None:
    device, stack = profiles.hardware("a100-80g"), profiles.stack("megascale")

    def rate(gemm: object, year: int) -> float:
        hardware = device.model_copy(update={"attained": device.attained.model_copy(update={"gemm": gemm})})
        libraries = stack.model_copy(update={"generation": year, "attained": Cost()})
        seconds = KernelTimes(hardware, libraries, "bf16", 2).gemm(8192, 8192, 8192)
        return 2 * 8192**3 / seconds / (312e12 * shape_share(8192, 8192, 8192, 108))

    years = {"2021": 0.5, "2023": 0.6}
    assert [rate(years, year) for year in (2020, 2021, 2022, 2023, 2025)] == pytest.approx([0.5, 0.5, 0.5, 0.6, 0.6])
    assert rate(0.7, 2020) == pytest.approx(0.7)


def test_fp8_rates_by_granularity() -> None:
    hardware = profiles.hardware("h100")
    kernels = KernelTimes(hardware, profiles.stack("megascale"), "bf16", 2)
    bf16, tensor, row, block = (kernels.gemm(8192, 8192, 8192, grain=g) for g in (None, "tensor", "row", "block"))
    assert tensor == pytest.approx(bf16 * 989.4 / 1978.9)
    assert (row, block) == pytest.approx(
        (tensor / hardware.attained.fp8["row"], tensor / hardware.attained.fp8["block"])
    )


def test_an_unlisted_kernel_takes_the_shares_of_the_next() -> None:
    slow, fast = (AttentionShares(forward=share, backward=share) for share in (0.2, 0.5))
    device = profiles.hardware("a100-80g").device.model_copy(update={"attention": {"triton": slow, "flash2": fast}})
    assert [device.attention_shares(kernel) for kernel in ("flash1", "triton", "flash2", "flash3")] == [
        slow,
        slow,
        fast,
        fast,
    ]
    assert device.model_copy(update={"attention": {}}).attention_shares("flash2") is None


def test_operands_with_scales_of_blocks() -> None:
    """Blackwell's tensor cores take them; an H100 decodes them to bf16, in another pass over memory."""

    def times(name: str, m: int = 8192) -> dict[str | None, float]:
        kernels = KernelTimes(profiles.hardware(name), profiles.stack("megascale"), "bf16", 2)
        return {grain: kernels.gemm(m, 8192, 8192, grain=grain) for grain in (None, "tensor", "mx", "nvfp4")}

    gb200, gb300, h100 = times("gb200"), times("gb300"), times("h100")
    assert gb200["nvfp4"] < gb200["tensor"] < gb200["mx"] < gb200[None]
    assert gb200[None] / gb200["nvfp4"] == pytest.approx(4 * 0.74) and gb300[None] / gb300["nvfp4"] > 4
    for grain, stored in (("mx", 33 / 32), ("nvfp4", 9 / 16)):
        kernels = KernelTimes(profiles.hardware("h100"), profiles.stack("megascale"), "bf16", 2)
        assert h100[grain] == pytest.approx(h100[None] + kernels.stream(2 * 8192**2 * (stored + 2)))

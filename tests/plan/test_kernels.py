"""Times of kernels: no faster than the device, and slower where shapes leave some of it idle."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.plan import profiles
from megascale.plan.kernels import Kernels, shape_share
from megascale.plan.profiles import Reached

SIZES = st.integers(1, 40_000)


@given(SIZES, SIZES, SIZES, st.sampled_from([80, 108, 132]))
def test_a_share_is_one(m: int, n: int, k: int, units: int) -> None:
    assert 0 < shape_share(m, n, k, units) <= 1


def test_large_products_are_at_the_rate_and_small_ones_below() -> None:
    assert shape_share(8192, 8192, 8192, 108) > 0.9
    assert shape_share(2048, 12_288, 12_288, 108) > 0.85
    assert shape_share(2048, 1536, 128, 108) < 0.5  # few terms
    assert shape_share(64, 64, 4096, 108) < 0.1  # one tile


@given(st.integers(1, 6), st.integers(1, 6), st.integers(6, 14))
def test_more_terms_are_never_slower_per_term(a: int, b: int, c: int) -> None:
    m, n = 256 * a, 256 * b
    assert shape_share(m, n, 2 << c, 108) >= shape_share(m, n, 1 << c, 108) - 1e-9


def test_a_product_takes_what_its_bytes_take_at_least() -> None:
    hardware = profiles.hardware("a100-80g")
    kernels = Kernels(hardware, profiles.stack("megascale"), "bf16", 2)
    thin = kernels.gemm(1, 32_768, 32_768)
    assert thin >= 2 * 32_768**2 / hardware.device.bandwidth
    flops = 2 * 8192**3
    assert flops / 312e12 < kernels.gemm(8192, 8192, 8192) < 2 * flops / 312e12
    assert kernels.gemm(0, 8, 8) == 0.0


def test_products_at_once_fill_a_device_together() -> None:
    kernels = Kernels(profiles.hardware("a100-80g"), profiles.stack("megascale"), "bf16", 2)
    one, many = kernels.gemm(256, 256, 4096), kernels.gemm(256, 256, 4096, count=108)
    assert one < many < 60 * one  # alone it leaves most multiprocessors idle
    assert kernels.gemm(4096, 4096, 4096, count=8) == pytest.approx(8 * kernels.gemm(4096, 4096, 4096), rel=0.1)
    thin = kernels.gemm(2048, 2048, 16, count=64)  # as fast as its results are written
    assert thin >= 64 * 2048**2 * 2 / (2.039e12 * kernels.hardware.attained.memory)


def test_a_narrow_head_takes_as_long_as_the_next_width_that_a_kernel_has() -> None:
    hardware, stack = profiles.hardware("a100-80g"), profiles.stack("megascale")

    def seconds(kernel: str, width: int) -> float:
        kernels = Kernels(hardware, stack.model_copy(update={"attention": kernel}), "bf16", 2)
        return kernels.attention(1e9 * width, backward=False, seen=1024, width=width)

    assert seconds("flash1", 96) == seconds("flash1", 128)
    assert seconds("flash2", 96) == pytest.approx(0.75 * seconds("flash2", 128))
    assert seconds("flash2", 80) == seconds("flash2", 96)
    assert seconds("flash1", 160) > seconds("flash1", 128)  # none is wide enough: as stated


def test_a_kernel_that_is_not_named_is_as_fast_as_the_next() -> None:
    slow, fast = (Reached(forward=share, backward=share) for share in (0.2, 0.5))
    device = profiles.hardware("a100-80g").device.model_copy(update={"attention": {"triton": slow, "flash2": fast}})
    assert [device.reached(kernel) for kernel in ("flash1", "triton", "flash2", "flash3")] == [slow, slow, fast, fast]
    assert device.model_copy(update={"attention": {}}).reached("flash2") is None

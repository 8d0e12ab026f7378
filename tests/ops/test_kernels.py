"""Attention by absent libraries: calls and results, checked with functions of the same signatures and documented
behaviour; and the selection of a backend.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from megascale.config.backends import BackendsConfig
from megascale.config.model import ModelConfig
from megascale.core.errors import MegascaleError
from megascale.device import Device, detect_device
from megascale.ops.core_attention import AttentionMask, CoreAttention, causal_attention, is_outdated_kernel
from megascale.ops.flash import flash
from megascale.ops.library import Library
from megascale.ops.select import NotByDefault, OpContext, build_op, select_backend, unsupported_reason
from megascale.ops.te_attention import te_attend
from tests.runs import LLAMA

H100 = Device(torch.device("cuda", 0), "nccl")


def banded(
    q: Tensor, k: Tensor, v: Tensor, before: int, after: int, scale: float | None, softcap: float = 0.0
) -> Tensor:
    """CoreAttention to keys from `before` to `after` a query's own, -1 for all; tensors [b, heads, s, d]."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    groups, s = q.shape[1] // k.shape[1], q.shape[2]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    ahead = torch.arange(s) - torch.arange(s)[:, None]
    hidden = torch.zeros(s, s, dtype=torch.bool)
    if before >= 0:
        hidden |= ahead < -before
    if after >= 0:
        hidden |= ahead > after
    scores = q @ k.mT * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    return scores.masked_fill(hidden, -math.inf).softmax(-1) @ v


def flash_attn_2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor:
    before, after = window_size
    assert dropout_p == 0
    out = banded(*(t.transpose(1, 2) for t in (q, k, v)), before, 0 if causal else after, softmax_scale, softcap)
    return out.transpose(1, 2).contiguous()


def flash_attn_3(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Tensor:
    return flash_attn_2(q, k, v, 0.0, softmax_scale, causal, window_size, softcap, None, deterministic)


def flash_attn_3_beta(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return flash_attn_3(*args, **kwargs), torch.zeros(1)


class DotProductAttention:
    """Stand in for Transformer Engine's class, for layout sbhd and causal masks."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        softmax_scale: float | None = None,
    ) -> None:
        assert (attention_dropout, qkv_format, attn_mask_type) == (0.0, "sbhd", "causal")
        self.heads, self.head_dim, self.groups = num_attention_heads, kv_channels, num_gqa_groups
        self.scale = softmax_scale

    def __call__(
        self, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor, *, window_size: tuple[int, int]
    ) -> Tensor:
        assert query_layer.shape[2:] == (self.heads, self.head_dim) and key_layer.shape[2] == self.groups
        assert window_size[0] >= -1 and window_size[1] == 0, "a causal mask has no keys to the right"
        given = (t.permute(1, 2, 0, 3) for t in (query_layer, key_layer, value_layer))
        return banded(*given, *window_size, self.scale).permute(2, 0, 1, 3).flatten(2)


FUNCTIONS: dict[str, Callable[[float | None], CoreAttention]] = {
    "flash-attn 2": lambda scale: flash(flash_attn_2, scale),
    "flash-attn 3": lambda scale: flash(flash_attn_3, scale),
    "flash-attn 3 beta": lambda scale: flash(flash_attn_3_beta, scale),
    "Transformer Engine": lambda scale: te_attend(DotProductAttention(4, 8, num_gqa_groups=2, softmax_scale=scale)),
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=list(FUNCTIONS))
@pytest.mark.parametrize("window", [None, 1, 3, 7])
@pytest.mark.parametrize("scale", [None, 0.2])
def test_attention_equals_torchs(
    function: Callable[[float | None], CoreAttention], window: int | None, scale: float | None
) -> None:
    generator = torch.Generator().manual_seed(0)
    heads = torch.randn(7, 2, 8, 8, generator=generator, dtype=torch.float64)  # [s, b, heads of q, k and v, d]
    given = heads.permute(1, 2, 0, 3).split([4, 2, 2], 1)
    expected = causal_attention(*given, window, scale)
    torch.testing.assert_close(function(scale)(*given, AttentionMask(window)), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("function", [flash_attn_2, flash_attn_3], ids=["flash-attn 2", "flash-attn 3"])
def test_flash_attention_caps_scores(function: Callable[..., Tensor]) -> None:
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(2, heads, 7, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)]
    ours = flash(function, 0.8, 1.5)(*given, AttentionMask(3))
    torch.testing.assert_close(ours, causal_attention(*given, 3, 0.8, 1.5), rtol=1e-12, atol=1e-12)


def setting(
    device: Device = H100, requested: str = "auto", tp: int = 1, dtype: str = "bfloat16", **model: Any
) -> OpContext:
    sizes = LLAMA | {"hidden_size": 128, "window": 4} | model
    return OpContext(
        ModelConfig.model_validate(sizes), BackendsConfig(attention=requested), getattr(torch, dtype), device, tp
    )


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that fakes installed libraries and a GPU generation."""

    def install(*names: str, capability: tuple[int, int] = (9, 0), kernel: str = "CUDNN_ATTENTION") -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(Device, "attention_kernel", lambda self, number_format, head_dim, shared: kernel)
        is_installed = lambda library: library.module.partition(".")[0] in names  # noqa: E731
        missing_reason = lambda library: None if is_installed(library) else f"{library.package} is not installed"  # noqa: E731
        monkeypatch.setattr(Library, "missing_reason", missing_reason)
        monkeypatch.delitem(sys.modules, "transformer_engine.pytorch", raising=False)
        for name in ("flash_attn", "flash_attn_interface", "transformer_engine", "triton"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name) if name in names else None)
        if "transformer_engine" in names:
            module: Any = ModuleType("transformer_engine.pytorch")
            module.DotProductAttention = DotProductAttention
            monkeypatch.setitem(sys.modules, module.__name__, module)

    return install


def test_a_cpu_selects_torch() -> None:
    choice = select_backend("attention", setting(detect_device(allow_gpu=False)))
    assert choice.backend == "torch"
    assert choice.rejected == {"flash": "needs a GPU", "te": "needs a GPU", "compile": "has no backward on a CPU"}
    for name in choice.rejected:
        with pytest.raises(MegascaleError, match=rf"backends\.attention = '{name}' cannot serve: {name}: "):
            select_backend("attention", setting(detect_device(allow_gpu=False), name))


def test_the_first_installed_library_is_selected(installed: Callable[..., None]) -> None:
    order = ["flash_attn", "transformer_engine", "triton"]
    selected = []
    for first in range(len(order) + 1):
        installed(*order[first:])
        selected.append(select_backend("attention", setting()).backend)
    assert selected == ["flash", "te", "compile", "torch"]
    rejected = select_backend("attention", setting()).rejected
    assert list(rejected) == ["flash", "te", "compile"]
    assert all(reason.endswith(" is not installed") for reason in rejected.values())


def test_without_a_window_auto_selects_torch(installed: Callable[..., None]) -> None:
    installed("flash_attn", "transformer_engine", "triton")
    for window in (None, 0, 16, [0, 99]):
        assert select_backend("attention", setting(window=window)).backend == "torch"
        assert select_backend("attention", setting(requested="flash", window=window)).backend == "flash"
    assert select_backend("attention", setting(window=[0, 4])).backend == "flash"
    assert isinstance(unsupported_reason("attention", "te", setting(window=None)), NotByDefault), (
        "megascale doctor tests the backend"
    )


def test_sparse_attention_selects_what_has_masks_by_head(installed: Callable[..., None]) -> None:
    sparse = {"window": None, "sparse_attention": {"local_blocks": 1, "stride": 4, "block": 2}}
    installed("flash_attn", "transformer_engine", "triton")
    choice, reason = select_backend("attention", setting(**sparse)), "has no mask by head, which sparse attention needs"
    assert (choice.backend, choice.rejected) == ("compile", {"flash": reason, "te": reason})
    installed("flash_attn", "transformer_engine")
    with pytest.raises(MegascaleError, match="torch: computes sparse attention on CPUs alone"):
        select_backend("attention", setting(**sparse))
    assert select_backend("attention", setting(detect_device(allow_gpu=False), **sparse)).backend == "torch"


@pytest.mark.parametrize(
    ("libraries", "capability", "kernel", "selected"),
    [
        (["flash_attn_interface", "transformer_engine"], (9, 0), "FLASH_ATTENTION", "flash"),
        (["flash_attn", "transformer_engine"], (9, 0), "FLASH_ATTENTION", "te"),
        (["flash_attn"], (9, 0), "FLASH_ATTENTION", "torch"),
        (["flash_attn_interface", "transformer_engine"], (9, 0), "CUDNN_ATTENTION", "torch"),
        (["flash_attn_interface", "transformer_engine"], (8, 0), "FLASH_ATTENTION", "torch"),
        (["flash_attn_interface", "transformer_engine"], (10, 0), "FLASH_ATTENTION", "te"),
    ],
)
def test_auto_prefers_newer_kernels_to_an_outdated_kernel_of_torch(
    installed: Callable[..., None], libraries: list[str], capability: tuple[int, int], kernel: str, selected: str
) -> None:
    installed(*libraries, capability=capability, kernel=kernel)
    assert select_backend("attention", setting(window=None)).backend == selected


@pytest.mark.parametrize(
    ("kernel", "capability", "expected"),
    [
        ("FLASH_ATTENTION", (8, 0), False), ("FLASH_ATTENTION", (9, 0), True), ("EFFICIENT_ATTENTION", (10, 0), True),
        ("FLASH_ATTENTION", (12, 0), False), ("CUDNN_ATTENTION", (9, 0), False), ("CUDNN_ATTENTION", (10, 0), False),
    ],
)  # fmt: skip
def test_which_kernels_are_surpassed(kernel: str, capability: tuple[int, int], expected: bool) -> None:
    assert is_outdated_kernel(kernel, capability) is expected


def test_the_kernel_of_torch_is_queried() -> None:
    cpu = detect_device(allow_gpu=False)
    asked = {shared: cpu.attention_kernel(torch.bfloat16, 64, shared) for shared in (False, True)}
    assert asked == {False: "FLASH_ATTENTION", True: "FLASH_ATTENTION"}
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert cpu.attention_kernel(torch.bfloat16, 64, True) == "MATH"


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("flash", {"dropout": 0.1}, "draws dropout of its own, which would depend on the layout"),
        ("te", {"dropout": 0.1}, "draws dropout of its own, which would depend on the layout"),
        ("compile", {"dropout": 0.1}, "draws dropout of its own, which would depend on the layout"),
        ("flash", {"dtype": "float32"}, "has no float32"),
        ("te", {"dtype": "float64"}, "has no float64"),
        ("compile", {"dtype": "float64"}, "has no float64"),
        ("flash", {"hidden_size": 2048}, "supports head dims up to 256, not 512"),
        ("te", {"hidden_size": 144}, "needs a head dim divisible by 8"),
        ("compile", {"hidden_size": 32}, "supports head dims from 16, not 8"),
        ("compile", {"window": None}, "is for layers with a window, and there is none"),
    ],
)
def test_reasons_of_unsupported_backends(
    installed: Callable[..., None], name: str, changes: dict[str, Any], reason: str
) -> None:
    installed("flash_attn", "transformer_engine", "triton")
    select_backend("attention", setting(requested=name))
    with pytest.raises(MegascaleError, match=reason):
        select_backend("attention", setting(requested=name, **changes))


@pytest.mark.parametrize("name", ["flash", "te"])
def test_old_gpus_are_unsupported(installed: Callable[..., None], name: str) -> None:
    installed("flash_attn", "transformer_engine", capability=(7, 5))
    with pytest.raises(MegascaleError, match=r"needs a GPU of compute capability 8\.0 or more"):
        select_backend("attention", setting(requested=name))


@pytest.mark.parametrize(
    ("libraries", "capability", "used"),
    [
        (["flash_attn", "flash_attn_interface"], (9, 0), "flash_attn_interface"),
        (["flash_attn_interface"], (9, 0), "flash_attn_interface"),
        (["flash_attn"], (9, 0), "flash_attn"),
        (["flash_attn", "flash_attn_interface"], (8, 0), "flash_attn"),
        (["flash_attn", "flash_attn_interface"], (10, 0), "flash_attn"),
    ],
)
def test_version_3_is_for_hopper(
    installed: Callable[..., None], libraries: list[str], capability: tuple[int, int], used: str
) -> None:
    installed(*libraries, capability=capability)
    called = []
    for name in libraries:
        module: Any = sys.modules[name]
        module.flash_attn_func = lambda *args, name=name, **kwargs: called.append(name) or args[0]
    q = torch.zeros(1, 4, 7, 8)
    build_op("attention", setting())(q, q, q, AttentionMask(3))
    assert called == [used]


def test_backends_without_a_soft_cap_are_refused(installed: Callable[..., None]) -> None:
    installed("transformer_engine", "triton")
    for window in (4, None):
        choice = select_backend("attention", setting(attention_softcap=50.0, window=window))
        assert choice.backend == "compile" and choice.rejected["te"] == "has no soft cap of scores"
    installed("flash_attn")
    assert select_backend("attention", setting(attention_softcap=50.0, window=None)).backend == "flash"
    installed()
    assert select_backend("attention", setting(attention_softcap=50.0)).backend == "torch"


def test_version_3_needs_a_head_dim_divisible_by_8(installed: Callable[..., None]) -> None:
    installed("flash_attn", "flash_attn_interface")
    q = torch.zeros(1, 4, 7, 36)
    sys.modules["flash_attn"].flash_attn_func = lambda *args, **kwargs: args[0]  # type: ignore[attr-defined]
    assert build_op("attention", setting(hidden_size=144))(q, q, q, AttentionMask(3)).shape == q.shape


def test_deterministic_algorithms_select_version_2(installed: Callable[..., None]) -> None:
    installed("flash_attn", "flash_attn_interface", capability=(9, 0))
    q = torch.zeros(1, 4, 7, 32)
    for name, result in (("flash_attn", q + 2), ("flash_attn_interface", q + 3)):
        sys.modules[name].flash_attn_func = lambda *_, result=result, **__: result.transpose(1, 2)  # type: ignore[attr-defined]
    assert build_op("attention", setting())(q, q, q, AttentionMask(3)).mean() == 3
    torch.use_deterministic_algorithms(True)
    try:
        assert build_op("attention", setting())(q, q, q, AttentionMask(3)).mean() == 2
    finally:
        torch.use_deterministic_algorithms(False)


def test_transformer_engine_gets_this_ranks_heads(installed: Callable[..., None]) -> None:
    installed("transformer_engine")
    q, k = torch.zeros(1, 2, 7, 32), torch.zeros(1, 1, 7, 32)  # of 4 and 2 heads, over two ranks
    assert build_op("attention", setting(tp=2))(q, k, k, AttentionMask(3)).shape == q.shape

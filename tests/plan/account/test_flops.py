"""FLOPs: against torch's own counter, and against the published tables."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from megascale.catalog.accelerators import ACCELERATORS, find_accelerator, stated_peak
from megascale.config.model import ModelConfig
from megascale.config.run import RunConfig
from megascale.layout.parameters import active_parameter_count, parameter_count
from megascale.plan.account.flops import hardware_flops, head_flops, mfu, token_flops
from tests.marks import only_quick
from tests.runs import FAMILIES, config_of, settings
from tests.thread_world import run_threads


def counted(run) -> int:
    """FLOPs of one step by torch's counter, with unfused attention."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from megascale.train.step import train_step

    batch = run.train_loader.batch(0)

    def addmm_(out, a, b, out_shape=None) -> int:  # missing in torch's list
        return 2 * a[0] * a[1] * b[1]

    with (
        sdpa_kernel(SDPBackend.MATH),
        FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: addmm_}) as counter,
    ):
        train_step(run, batch)
    return counter.get_total_flops()


@pytest.mark.parametrize("family", FAMILIES)
def test_model_flops_equal_torchs_counter(family, tmp_path) -> None:
    sizes = FAMILIES[family] | {"hidden_size": 64, "seq_length": 64, "vocab_size": 512}
    config = config_of(settings(sizes, tmp_path, train__precision="fp32", batch__global=2), tmp_path)
    tokens = config.batch.total * config.model.seq_length
    (flops,) = run_threads(config, counted)
    assert flops == pytest.approx(token_flops(config.model).full * tokens, rel=1e-3)


BLOCKS = ["serial", "parallel", "parallel_two_norms", "sandwich", "post_norm", "fog"]


@pytest.mark.parametrize("block", only_quick(BLOCKS, "parallel"))
@pytest.mark.parametrize("family", only_quick(FAMILIES, "gpt"))
def test_hardware_flops_equal_torchs_counter(family, block, tmp_path) -> None:
    sizes = FAMILIES[family] | {"hidden_size": 64, "seq_length": 64, "vocab_size": 512, "block": block}
    tokens, run = 2 * 64, {"train__precision": "fp32", "batch__global": 2}
    shares, trees = {}, [settings(sizes, tmp_path, **run, **more) for more in RECOMPUTE.values()]
    configs = [config_of(tree, tmp_path) for tree in trees]
    for name, config in zip(RECOMPUTE, configs, strict=True):
        (flops,) = run_threads(config, counted)
        assert flops == pytest.approx(hardware_flops(config).full * tokens, rel=1e-3), name
        shares[name] = hardware_flops(config).full / token_flops(config.model).full
    assert shares["none"] == shares["norm and activation"] == 1 < shares["attention"] < shares["full"] < 4 / 3
    again = {name: shares[f"{name} and tiles"] - shares[name] for name in ("none", "attention", "full")}
    assert again["none"] > 0 and again["attention"] == pytest.approx(again["none"])
    skips = block in ("serial", "parallel", "parallel_two_norms")
    assert again["full"] == pytest.approx(0 if skips else again["none"])


RECOMPUTE = {
    "none": {},
    "full": {"train__recompute": "full"},
    "attention": {"train__recompute": "selective"},
    "norm and activation": {"train__recompute": "selective", "train__recompute_ops": ["norm", "activation"]},
}
RECOMPUTE |= {f"{name} and tiles": RECOMPUTE[name] | {"train__mlp_tiles": 4} for name in ("none", "attention", "full")}


def test_tiles_recompute_all_but_the_last_gemm_of_the_mlp(tmp_path) -> None:
    """Whatever layers are recomputed; by hand for a GPT model without grouped heads and with f = 4 h."""
    layout = {"parallel__pp": 2, "parallel__vpp": 2, "train__memory": ["full", "full", "keep", "keep"]}
    config = config_of(settings(FAMILIES["gpt"], tmp_path, train__mlp_tiles=2), tmp_path)
    chunked = config_of(settings(FAMILIES["gpt"], tmp_path, train__mlp_tiles=2, **layout), tmp_path)
    l, h, s = 4, 32, 16  # noqa: E741
    again = [hardware_flops(each).full - token_flops(each.model).full for each in (config, chunked)]
    assert again == pytest.approx([2 * l * 4 * h**2, 2 * (2 * (8 * h**2 + 2 * s * h) + 2 * 4 * h**2)])


def test_hardware_flops_by_the_share_of_layers(tmp_path) -> None:
    """Chunks 0 have the first three layers of seven."""
    layout = {"parallel__pp": 2, "parallel__vpp": 2, "parallel__layers_per_chunk": [1, 2, 2, 2], "model__num_layers": 7}

    def recomputed(**more) -> float:
        config = config_of(settings(FAMILIES["gpt"], tmp_path, **layout, **more), tmp_path)
        return hardware_flops(config).causal - token_flops(config.model).causal

    for recompute in ("selective", "full"):
        full = recomputed(train__recompute=recompute)
        assert full > 0
        assert recomputed(train__memory=[*[recompute] * 3, *["keep"] * 4]) == pytest.approx(3 / 7 * full)
        assert recomputed(train__memory=[*["keep"] * 3, *[recompute] * 4]) == pytest.approx(4 / 7 * full)


def test_full_recomputation_by_hand() -> None:
    """GPT-3 175B without biases: a block is 12 h^2, of which the last GEMM is 4 h^2, and attention 2 s h."""
    tree = {"name": "x", "model": {"preset": "gpt3-175b"}, "batch": {"global": 8}, "optimizer": {"lr": 1e-4}}
    tree |= {"train": {"steps": 1, "recompute": "full"}, "data": {"mock": True}}
    config = RunConfig.model_validate(tree).resolve(1)
    l, h, s = 96, 12_288, 2048  # noqa: E741
    recomputed = hardware_flops(config).full - token_flops(config.model).full
    assert recomputed == pytest.approx(2 * l * (8 * h**2 + 2 * s * h))


def test_the_formula_of_narayanan_et_al() -> None:
    model = ModelConfig(preset="megascale-175b")
    l, h, s, v = model.num_layers, model.hidden_size, model.seq_length, model.vocab_size  # noqa: E741
    assert token_flops(model).full == pytest.approx(72 * l * h**2 * (1 + s / (6 * h) + v / (12 * l * h)), rel=1e-12)


@pytest.mark.parametrize("window", [1, 2, 7, 63, 64, 100, [3, 0], [5, 64, 1], None, 0])
@pytest.mark.parametrize("family", FAMILIES)
def test_windows_count_unmasked_keys(family: str, window: int | list[int] | None) -> None:
    """Counted pair by pair; `causal` approximates the first queries' triangle by w^2 / 2, w / 2 too many."""
    s, layers = 64, 4
    model = ModelConfig.model_validate(FAMILIES[family] | {"seq_length": s, "window": window})
    pattern = window if isinstance(window, list) else [window or 0]
    windows = [pattern[layer % len(pattern)] or s for layer in range(layers)]
    seen = sum(sum(j <= i and j > i - w for i in range(s) for j in range(s)) for w in windows)
    corner = sum(min(w, s) / 2 for w in windows)
    pair_flops = 3 * 2 * 2 * model.num_heads * model.head_dim  # forward and backward, score and value, multiply and add
    flops = token_flops(model)
    assert (flops.causal - flops.linear) * s == pytest.approx(pair_flops * (seen - corner), rel=1e-12)
    assert (flops.full - flops.linear) * s == pytest.approx(pair_flops * s * sum(min(w, s) for w in windows), rel=1e-12)


def test_a_window_of_the_full_sequence_has_no_effect() -> None:
    sizes = [FAMILIES["llama"] | {"window": window} for window in (None, 0, 16, 17, [0, 16])]
    assert len({token_flops(ModelConfig.model_validate(model)) for model in sizes}) == 1


def test_head_flops_do_not_grow_with_the_layers() -> None:
    one, two = (token_flops(ModelConfig(preset="llama3-8b", num_layers=layers)) for layers in (1, 2))
    assert head_flops(ModelConfig(preset="llama3-8b")) == one.linear - (two.linear - one.linear)


def test_windows_of_recomputed_chunks(tmp_path) -> None:
    """The first chunk of a rank has windowed attention, the second full attention."""
    layout = {"parallel__pp": 2, "parallel__vpp": 2, "model__window": [4, 4, 0, 0]}

    def recomputed(*policies: str) -> tuple[float, float]:
        tree = settings(FAMILIES["gpt"], tmp_path, **layout, train__memory=[*policies])
        config = config_of(tree, tmp_path)
        hardware, model = hardware_flops(config), token_flops(config.model)
        return hardware.full - model.full, hardware.causal - model.causal

    windowed = recomputed("selective", "selective", "keep", "keep")
    full = recomputed("keep", "keep", "selective", "selective")
    assert windowed[0] == pytest.approx(full[0] * 4 / 16)
    assert windowed[1] == pytest.approx(full[1] * (4 - 4 * 4 / 32) / 8)


QWEN3 = {
    "norm": "rmsnorm", "activation": "swiglu", "position": "rope", "bias": False, "tie_embeddings": False,
    "qk_norm": "head", "head_dim": 128, "num_kv_heads": 4, "vocab_size": 151_936, "seq_length": 4096, "experts": 128,
    "experts_per_token": 8,
}  # fmt: skip
QWEN3_235B = QWEN3 | {
    "num_layers": 94, "hidden_size": 4096, "num_heads": 64, "ffn_size": 12_288, "expert_ffn_size": 1536,
}  # fmt: skip
QWEN3_30B = QWEN3 | {
    "num_layers": 48, "hidden_size": 2048, "num_heads": 32, "ffn_size": 6144, "expert_ffn_size": 768,
}  # fmt: skip
MEGASCALE_352B = QWEN3 | {
    "num_layers": 60, "hidden_size": 4096, "num_heads": 32, "num_kv_heads": 8, "qk_norm": "none", "ffn_size": 14_336,
    "vocab_size": 65_536, "seq_length": 8192, "experts": 32, "experts_per_token": 3, "shared_ffn_size": 14_336,
}  # fmt: skip
GPT_OSS_120B = QWEN3 | {
    "num_layers": 36, "hidden_size": 2880, "num_heads": 64, "num_kv_heads": 8, "head_dim": 64, "qk_norm": "none",
    "ffn_size": 2880, "vocab_size": 201_088, "experts_per_token": 4, "attention_sinks": True, "window": [128, 0],
    "bias": True, "activation": "clamped_swiglu", "router_bias": True,
}  # fmt: skip
MIXTRAL = QWEN3 | {
    "num_layers": 32, "hidden_size": 4096, "num_heads": 32, "num_kv_heads": 8, "qk_norm": "none", "ffn_size": 14_336,
    "vocab_size": 32_000, "experts": 8, "experts_per_token": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "ours", "published"),
    [
        (QWEN3_235B, 148.33, (147.96, 148.14)), (QWEN3_30B, 23.08, (23.10, 23.00)),
        (MEGASCALE_352B, 282.51, (282.3, 282.6)), (GPT_OSS_120B, 32.71, (32.61, 32.58)),
    ],
    ids=["Qwen3-235B", "Qwen3-30B", "MegaScale-MoE 352B", "gpt-oss-120B"],
)  # fmt: skip
def test_experts_count_as_published(model: dict[str, object], ours: float, published: tuple[float, float]) -> None:
    """GFLOPs of a token that pairs of tokens/s and FLOP/s give (NVIDIA 2026, arXiv 2603.07685, table 11, and
    Megatron-Bridge's performance summary), or tokens/s and MFU (Jin et al. 2025, arXiv 2505.11432, table 3).
    """
    flops = token_flops(ModelConfig.model_validate(model)).causal / 1e9
    assert flops == pytest.approx(ours, abs=0.005)
    assert all(flops == pytest.approx(pair, rel=0.007) for pair in published)


def test_experts_with_full_attention() -> None:
    """Megatron-Bridge prints 37,578,559,488."""
    assert token_flops(ModelConfig.model_validate(QWEN3_30B | {"seq_length": 8192})).full == pytest.approx(
        37_578_559_488, rel=1e-4
    )


@pytest.mark.parametrize(
    ("model", "total", "active"),
    [(QWEN3_235B, 235.09, 22.19), (QWEN3_30B, 30.53, 3.35), (MIXTRAL, 46.70, 12.88), (MEGASCALE_352B, 351.86, 45.34)],
    ids=["Qwen3-235B", "Qwen3-30B", "Mixtral 8x7B", "MegaScale-MoE 352B"],
)  # fmt: skip
def test_active_parameters(model: dict[str, object], total: float, active: float) -> None:
    """Billions, as published: 235B with 22B active, 30.5B with 3.3B, 46.7B with 12.9B, 352B."""
    config = ModelConfig.model_validate(model)
    counts = [count(config) / 1e9 for count in (parameter_count, active_parameter_count)]
    assert counts == pytest.approx([total, active], abs=0.005)


def test_a_dense_model_uses_all_parameters() -> None:
    model = ModelConfig(preset="llama3-8b")
    assert active_parameter_count(model) == parameter_count(model)


@dataclass(frozen=True)
class Row:
    """A row of table 2 of the paper: 175B on A100s."""

    batch: int
    gpus: int
    seconds: float
    percent: float


# FLOPs per token are MFU x peak / (tokens/s): 1.076e12 to 1.078e12 in the rows of Megatron-LM, with the full attention
# matrix; 1.064e12 to 1.067e12 in the rows of MegaScale, with the causal half, except for a row of 1.0745e12.
MEGATRON = [
    Row(768, 256, 40.0, 53.0), Row(768, 512, 21.2, 49.9), Row(768, 768, 15.2, 46.7), Row(768, 1024, 11.9, 44.7),
    Row(6144, 3072, 29.02, 48.7), Row(6144, 6144, 14.78, 47.8), Row(6144, 8192, 12.24, 43.3),
    Row(6144, 12288, 8.57, 41.2),
]  # fmt: skip
MEGASCALE = [
    Row(768, 256, 32.0, 65.3), Row(768, 512, 16.5, 63.5), Row(768, 1024, 8.9, 59.0),
    Row(6144, 3072, 23.66, 59.1), Row(6144, 6144, 12.21, 57.3), Row(6144, 8192, 9.56, 54.9),
    Row(6144, 12288, 6.34, 55.2),
]  # fmt: skip
MEGASCALE_FULL = [Row(768, 768, 11.5, 61.3)]


@pytest.mark.parametrize(
    ("row", "convention"),
    [(row, "full") for row in MEGATRON + MEGASCALE_FULL] + [(row, "causal") for row in MEGASCALE],
    ids=str,
)
def test_table_2_of_the_paper(row: Row, convention: str) -> None:
    model = ModelConfig(preset="megascale-175b")
    peak = stated_peak("NVIDIA A100-SXM4-80GB", "bf16")
    assert peak is not None
    tokens_per_s = row.batch * model.seq_length / row.seconds
    computed = mfu(getattr(token_flops(model), convention), tokens_per_s, row.gpus * peak.flops)
    assert abs(100 * computed - row.percent) < 0.3


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
        ("Tesla V100-SXM2-32GB", "V100"),
        ("AMD Instinct MI250X", "MI250X"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_accelerators_by_driver_name(device: str, name: str) -> None:
    accelerator = find_accelerator(device)
    assert accelerator is not None and accelerator.name == name


@pytest.mark.parametrize("device", ["NVIDIA L40S", "NVIDIA GeForce RTX 4090", "NVIDIA GB10", "unknown"])
def test_an_unknown_device_has_no_peak(device: str) -> None:
    assert stated_peak(device, "bf16") is None


def test_every_accelerator_of_the_design_is_listed() -> None:
    names = {accelerator.name for accelerator in ACCELERATORS}
    assert {"V100", "A100", "H100", "H200", "B200", "MI250X", "MI300X"} <= names

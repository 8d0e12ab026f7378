"""Layout invariance: losses and gradient norms of steps equal those of one process in every layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megascale.config.run import RunConfig
from megascale.core.rank import Rank
from tests.runs import FAMILIES, MODELS, build_run, config_of, curve_of, settings
from tests.worlds import run_world

Layout = dict[str, Any]
Curve = list[tuple[float, float]]

V = {"parallel__pp": 2, "parallel__vpp": 2, "parallel__schedule": "zb_v"}
DOMINO = {"overlap__tp": "domino", "batch__micro": 2}

LAYOUTS: dict[str, Layout] = {
    # world 1
    "micro2": {"batch__micro": 2},
    "micro8 zero0": {"batch__micro": 8, "parallel__zero": 0},
    # world 2
    "tp2": {"parallel__tp": 2},
    "tp2 sp": {"parallel__tp": 2, "parallel__sp": True},
    "tp2 domino": {"parallel__tp": 2, **DOMINO},
    "tp2 sp domino": {"parallel__tp": 2, "parallel__sp": True, **DOMINO},
    "tp2 sp domino, full recomputation": {
        "parallel__tp": 2, "parallel__sp": True, "train__recompute": "full", **DOMINO,
    },
    "pp2": {"parallel__pp": 2},
    "pp2 gpipe": {"parallel__pp": 2, "parallel__schedule": "gpipe"},
    "pp2 vpp2": {"parallel__pp": 2, "parallel__vpp": 2},
    "pp2 uneven": {"parallel__pp": 2, "parallel__layers_per_chunk": [3, 1]},
    "pp2 vpp3 ends without layers": {"parallel__pp": 2, "parallel__vpp": 3},
    "pp2 vocabulary": {"parallel__pp": 2, "parallel__vocab_pp": 2},
    "dp2 zero0": {"parallel__dp": 2, "parallel__zero": 0},
    "dp2 zero1": {"parallel__dp": 2, "parallel__zero": 1},
    "dp2 zero2": {"parallel__dp": 2, "parallel__zero": 2},
    "tp2 no overlap": {"parallel__tp": 2, "overlap__tp": False},
    "pp2 vpp2 no overlap": {"parallel__pp": 2, "parallel__vpp": 2, "overlap__pp": False, "overlap__dp": False},
    # world 4
    "tp2 pp2 sp": {"parallel__tp": 2, "parallel__pp": 2, "parallel__sp": True},
    "tp2 dp2 zero2": {"parallel__tp": 2, "parallel__dp": 2, "parallel__zero": 2},
    "pp2 vpp2 dp2 zero1": {"parallel__pp": 2, "parallel__vpp": 2, "parallel__dp": 2},
    "pp4": {"parallel__pp": 4},
    "pp4 vocabulary": {"parallel__pp": 4, "parallel__vocab_pp": 1},
    "tp2 pp2 vocabulary": {"parallel__tp": 2, "parallel__pp": 2, "parallel__vocab_pp": 1},
    "cp2 ring pp2 vocabulary": {"parallel__cp": 2, "parallel__pp": 2, "parallel__vocab_pp": 2},
    "dp4 zero2": {"parallel__dp": 4, "parallel__zero": 2},
    "pp2 dp2 gpipe zero2": {"parallel__pp": 2, "parallel__dp": 2, "parallel__schedule": "gpipe", "parallel__zero": 2},
    "tp2 sp dp2 zero0": {"parallel__tp": 2, "parallel__sp": True, "parallel__dp": 2, "parallel__zero": 0},
    "cp2 ulysses": {"parallel__cp": 2, "parallel__cp_mode": "ulysses"},
    "cp2 allgather dp2": {"parallel__cp": 2, "parallel__cp_mode": "allgather", "parallel__dp": 2},
    "cp2 ring pp2 vpp2 zero2": {"parallel__cp": 2, "parallel__pp": 2, "parallel__vpp": 2, "parallel__zero": 2},
    "cp2 ring tp2 sp": {"parallel__cp": 2, "parallel__tp": 2, "parallel__sp": True},
    "cp4 usp zero0": {"parallel__cp": 4, "parallel__cp_mode": "usp", "parallel__cp_a2a_size": 2, "parallel__zero": 0},
    "cp2 ring tp2 sp domino": {"parallel__cp": 2, "parallel__tp": 2, "parallel__sp": True, **DOMINO},
    "tp2 sp pp2 vpp2 domino": {
        "parallel__tp": 2, "parallel__sp": True, "parallel__pp": 2, "parallel__vpp": 2, **DOMINO, "batch__micro": 4,
    },
    "tp2 dp2 zero2 domino": {"parallel__tp": 2, "parallel__dp": 2, "parallel__zero": 2, **DOMINO},
    "tiles tp2 sp pp2": {"train__mlp_tiles": 3, "parallel__tp": 2, "parallel__sp": True, "parallel__pp": 2},
    "tiles pp2 vpp2 dp2 zero2, full recomputation": {
        "train__mlp_tiles": 4, "train__recompute": "full", "parallel__pp": 2, "parallel__vpp": 2, "parallel__dp": 2,
        "parallel__zero": 2,
    },
    "offload pp2 vpp2": {
        "train__memory": ["full_host"], "parallel__pp": 2, "parallel__vpp": 2,
    },
    "layer memory tp2 sp pp2 vpp2": {
        "train__memory": ["host", "full", "keep", "selective"], "parallel__tp": 2, "parallel__sp": True,
        "parallel__pp": 2, "parallel__vpp": 2,
    },
    "layer memory pp2 v dp2 zero2, shares of tiles": {
        **V, "train__memory": ["host", {"host": 0.5}], "train__mlp_tiles": 4, "parallel__dp": 2, "parallel__zero": 2,
    },
    "chunks pp2 dp2": {
        "data__sequence_chunk_tokens": 4, "data__sequence_chunks_saved": 2, "parallel__pp": 2, "parallel__dp": 2,
    },
    "pp2 v": {**V},
    "pp2 v uneven no overlap": {
        **V, "parallel__layers_per_chunk": [1, 1, 2, 0], "overlap__pp": False, "overlap__dp": False,
    },
    "tp2 pp2 v": {**V, "parallel__tp": 2, "parallel__zero": 0},
    "tp2 sp pp2 v": {**V, "parallel__tp": 2, "parallel__sp": True},
    "pp2 v dp2 zero2": {**V, "parallel__dp": 2, "parallel__zero": 2, "overlap__bucket_bytes": 60_000},
    "cp2 ring pp2 v zero2": {**V, "parallel__cp": 2, "parallel__zero": 2},
    "pp2 v offload": {**V, "train__memory": ["full_host"]},
    "pp3 v": {**V, "parallel__pp": 3},
    "pp2 v vocabulary": {**V, "parallel__vocab_pp": 1},
    "tp2 sp pp2 v vocabulary": {**V, "parallel__tp": 2, "parallel__sp": True, "parallel__vocab_pp": 2},
    "pp3 zb_h1 vocabulary": {"parallel__pp": 3, "parallel__schedule": "zb_h1", "parallel__vocab_pp": 1},
    "pp2 interleaved_zb dp2 zero2 vocabulary": {
        **V, "parallel__schedule": "interleaved_zb", "parallel__dp": 2, "parallel__zero": 2, "parallel__vocab_pp": 2,
    },
    "dp2 zero3": {"parallel__dp": 2, "parallel__zero": 3},
    "dp2 zero3 keep, no overlap": {
        "parallel__dp": 2, "parallel__zero": 3, "parallel__reshard": "keep", "overlap__dp": False,
    },
    "tp2 sp dp2 zero3, full recomputation": {
        "parallel__tp": 2, "parallel__sp": True, "parallel__dp": 2, "parallel__zero": 3, "train__recompute": "full",
    },
    "cp2 ring dp2 zero3": {"parallel__cp": 2, "parallel__dp": 2, "parallel__zero": 3},
    "pp2 vpp2 dp2 zero3 microbatch": {
        "parallel__pp": 2, "parallel__vpp": 2, "parallel__dp": 2, "parallel__zero": 3,
        "parallel__reshard": "microbatch",
    },
    "pp2 v dp2 zero3 forward": {**V, "parallel__dp": 2, "parallel__zero": 3, "parallel__reshard": "forward"},
    "dp4 in twos zero2": {"parallel__dp": 4, "parallel__dp_shard": 2, "parallel__zero": 2},
    "dp4 in twos zero3, state over all": {
        "parallel__dp": 4, "parallel__dp_shard": 2, "parallel__zero": 3, "parallel__state_shard": "all",
    },
    # world 8
    "tp2 sp dp4 in twos zero1": {
        "parallel__tp": 2, "parallel__sp": True, "parallel__dp": 4, "parallel__dp_shard": 2,
    },
    "cp2 ring tp2 sp pp2": {"parallel__cp": 2, "parallel__tp": 2, "parallel__sp": True, "parallel__pp": 2},
    "tp2 sp pp2 vpp2 dp2 zero1": {
        "parallel__tp": 2, "parallel__sp": True, "parallel__pp": 2, "parallel__vpp": 2, "parallel__dp": 2,
    },
    "tp2 sp pp2 vpp2 dp2 zero2": {
        "parallel__tp": 2, "parallel__sp": True, "parallel__pp": 2, "parallel__vpp": 2, "parallel__dp": 2,
        "parallel__zero": 2,
    },
    "tp2 sp pp2 vpp2 vocabulary dp2 zero2": {
        "parallel__tp": 2, "parallel__sp": True, "parallel__pp": 2, "parallel__vpp": 2, "parallel__vocab_pp": 1,
        "parallel__dp": 2, "parallel__zero": 2,
    },
    "pp4 vocabulary dp2 gpipe zero0": {
        "parallel__pp": 4, "parallel__vocab_pp": 2, "parallel__dp": 2, "parallel__schedule": "gpipe",
        "parallel__zero": 0,
    },
    "pp4 dp2 gpipe zero0": {"parallel__pp": 4, "parallel__dp": 2, "parallel__schedule": "gpipe", "parallel__zero": 0},
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A run for all layouts. `tolerance`: relative, for all losses and for the first `norms` gradient norms. `quick`:
    also in the quick suite.
    """

    family: str
    dropout: float
    precision: str
    tolerance: float
    norms: int = 10
    block: str | None = None
    model: dict[str, Any] = field(default_factory=dict)
    quick: bool = False
    data: dict[str, Any] = field(default_factory=dict)


GEMMA_LIKE = {
    "head_dim": 12, "qk_norm": "head", "softmax_scale": 0.2, "attention_softcap": 2.0, "window": [5, 0],
    "local_rope_theta": 50.0, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_seq_length": 8},
}  # fmt: skip
DOCUMENTS = {"data__attention_mask": "document", "data__document_length": 5}
FROZEN_STAGE = {"train__freeze": ["embedding.*", "layers.[01].*", "layers.*.mlp.*.bias"]}
FROZEN_WEIGHTS = {"train__freeze": ["layers.*.attention.[qkv].*", "layers.2.mlp.down.weight", "head.*", "*norm*"]}
SPARSE = {"local_blocks": 1, "stride": 2, "block": 2}
OLMO_LIKE = {"qk_norm": "full", "qkv_bias": True, "rotary_fraction": 0.5}

CASES = [
    *(Case(family, dropout, "fp64", 1e-10, quick=dropout > 0) for family in FAMILIES for dropout in (0.0, 0.1)),
    Case("gpt", 0.1, "fp64", 1e-10, block="parallel"),
    Case("llama", 0.0, "fp64", 1e-10, block="parallel"),
    Case("llama", 0.1, "fp64", 1e-10, block="parallel", model=OLMO_LIKE),
    Case("gemma2", 0.0, "fp64", 1e-10, model=GEMMA_LIKE, quick=True),
    Case("gemma2", 0.1, "fp64", 1e-10),
    Case("olmo2", 0.1, "fp64", 1e-10, model={"qk_norm": "full"}, quick=True),
    Case("olmo2", 0.0, "fp64", 1e-10, block="fog", model={"qk_norm": "tanh", "embedding_scale": 50.0}, quick=True),
    Case("olmo2", 0.1, "fp64", 1e-10, block="fog", model={"qk_norm": "fixed"}, data=DOCUMENTS),
    Case("olmo2", 0.1, "fp64", 1e-10, model={"unit_scaling": True, "mup_base_width": 16}, quick=True),
    Case("neox", 0.1, "fp64", 1e-10),
    Case("gpt", 0.1, "fp64", 1e-10, data=FROZEN_STAGE, quick=True),
    Case("llama", 0.0, "fp64", 1e-10, data=FROZEN_WEIGHTS),
    Case("gpt", 0.1, "fp64", 1e-10, data=DOCUMENTS),
    Case("gemma2", 0.0, "fp64", 1e-10, model=GEMMA_LIKE, data=DOCUMENTS),
    Case("llama", 0.0, "fp64", 1e-10, model={"sparse_attention": SPARSE}, data=DOCUMENTS, quick=True),
    Case("gpt", 0.1, "fp32", 1e-5),
    Case("llama", 0.0, "fp32", 1e-5),
    # bfloat16 has 8 bits of precision: another order of sums changes the third digit, and Adam amplifies the change
    Case("gpt", 0.0, "bf16", 1e-2, norms=3),
    Case("llama", 0.0, "bf16", 1e-2, norms=3, quick=True),
    Case("gemma2", 0.0, "bf16", 1e-2, norms=3),
]
QUICK_CASES = [case for case in CASES if case.quick]


STEPS, QUICK_STEPS = 10, 2


def configurations(cases: Sequence[Case], steps: int, folder: Path, **layout: Any) -> list[RunConfig]:
    """Configurations of cases in one layout."""
    configs = []
    for case in cases:
        changes = {
            "model__dropout": case.dropout,
            "train__precision": case.precision,
            "train__steps": steps,
            "optimizer__lr": 1e-3,
            "optimizer__warmup_steps": min(2, steps - 1),
        } | case.data
        model = MODELS[case.family] | ({"block": case.block} if case.block else {}) | case.model
        configs.append(config_of(settings(model, folder, **changes, **layout), folder))
    return configs


def train_all(rank: Rank, configs: list[RunConfig]) -> list[Curve]:
    """Curves of several runs, one after another on one mesh."""
    mesh = build_run(rank, configs[0]).mesh  # the first model ties its embeddings, so its mesh has every group
    return [curve_of(build_run(rank, config, mesh), config.train.steps) for config in configs]


Alone = Callable[[list[Case], int], list[Curve]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """A function that returns the curves of one process."""
    known: dict[tuple[str, int], Curve] = {}

    def curves(cases: list[Case], steps: int) -> list[Curve]:
        new = [case for case in cases if (repr(case), steps) not in known]
        if new:
            trained = run_world(1, train_all, configurations(new, steps, tmp_path_factory.mktemp("alone")))[0]
            known.update(zip([(repr(case), steps) for case in new], trained, strict=True))
        return [known[repr(case), steps] for case in cases]

    return curves


def worst(curve: Curve, expected: Curve, norms: int) -> float:
    """Largest relative difference of losses and of the first `norms` gradient norms."""
    losses = [(a[0], b[0]) for a, b in zip(curve, expected, strict=True)]
    pairs = losses + [(a[1], b[1]) for a, b in zip(curve[:norms], expected[:norms], strict=True)]
    return max(abs(a - b) / abs(b) for a, b in pairs)


QUICK = ("pp2 vpp2 dp2 zero1", "pp2 v dp2 zero2", "tp2 pp2 vocabulary")


def works_with(case: Case, layout: Layout) -> bool:
    """Return True if a layout runs the case: parts of sequences have no dropout, and but by Ulysses no soft cap."""
    capped = "attention_softcap" in case.model and layout.get("parallel__cp_mode") != "ulysses"
    return not (layout.keys() & {"parallel__cp", "data__sequence_chunk_tokens"}) or not (case.dropout or capped)


def check_layout(name: str, cases: list[Case], steps: int, alone: Alone, folder: Path) -> None:
    cases = [case for case in cases if works_with(case, LAYOUTS[name])]
    configs = configurations(cases, steps, folder, **LAYOUTS[name])
    ranks = run_world(configs[0].world_size, train_all, configs)
    assert all(curves == ranks[0] for curves in ranks), "ranks disagree about the same sums"
    for case, curve, expected in zip(cases, ranks[0], alone(cases, steps), strict=True):
        assert worst(curve, expected, case.norms) < case.tolerance, case


@pytest.mark.parametrize("name", QUICK)
def test_layouts_are_the_same_run(name: str, alone: Alone, tmp_path: Path) -> None:
    check_layout(name, QUICK_CASES, QUICK_STEPS, alone, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_the_same_run(name: str, alone: Alone, tmp_path: Path) -> None:
    check_layout(name, CASES, STEPS, alone, tmp_path)


def test_the_runs_differ_from_each_other(alone: Alone) -> None:
    """The reference curves differ between the cases."""
    curves = alone(QUICK_CASES, QUICK_STEPS)
    exact = curves[:-1]
    assert all(worst(a, b, 10) > 1e-3 for i, a in enumerate(exact) for b in exact[:i])
    assert all(curve[-1][0] != curve[0][0] for curve in curves)

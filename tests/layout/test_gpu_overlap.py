"""Overlap of tp's collectives on GPUs: what stays exposed, with a hint that helps, and how long it takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from megascale.cli.check_run import host_warnings
from megascale.config.loading import load_config
from megascale.config.run import RunConfig
from megascale.layout.gpu_overlap import SENT, exposed_collectives, overlaps_on_gpus
from megascale.plan.search.plan import Plan
from megascale.plan.simulate import profiles

GPT = str(Path(__file__).parents[2] / "configs/gpu/gpt3-175b.toml")
MICRO, BLOCKWISE, BLOCK = "batch.micro=1", "fp8.recipe=blockwise", "model.block=parallel"
FP8, ONE_HOST = "train.precision=fp8", ("parallel.pp=1", "parallel.vpp=1", "parallel.schedule=1f1b")
HINTS: list[tuple[tuple[str, ...], int, list[str]]] = [  # settings, processes, hints
    ((), 1024, []),
    ((MICRO,), 1024, ["batch.micro = 2"]),
    ((MICRO, "model.seq_length=1024"), 1024, ["batch.micro = 4"]),
    ((MICRO, "batch.global=16"), 1024, ["batch.micro = 2 or more, with a larger batch.global"]),
    ((MICRO, "batch.global=48"), 1024, ["batch.micro = 3"]),
    ((MICRO, *ONE_HOST), 8, ["batch.micro = 2"]),
    ((MICRO, "parallel.sp=false"), 1024, []),
    ((MICRO, "overlap.tp=false"), 1024, []),
    ((MICRO, "parallel.tp=4"), 1024, []),
    (("parallel.tp=16", "batch.micro=4", "overlap.tp=domino"), 1024, []),
    ((FP8,), 1024, []),
    ((FP8, "fp8.recipe=rowwise"), 1024, ["fp8.recipe = tensorwise or delayed"]),
    ((FP8, BLOCKWISE), 1024, ["fp8.recipe = tensorwise or delayed"]),
    ((FP8, BLOCKWISE, "parallel.tp=4"), 1024, []),
    ((BLOCK,), 1024, ["parallel.tp = 4"]),
    ((BLOCK, MICRO), 1024, ["batch.micro = 2", "parallel.tp = 4"]),
    (("parallel.tp=16", "batch.micro=4"), 1024, ["parallel.tp = 8"]),
]


def hints(config: RunConfig) -> list[str]:
    return [each.hint.removesuffix(", if memory allows") for each in exposed_collectives(config, 8)]


@pytest.mark.parametrize(("settings", "processes", "expected"), HINTS)
def test_what_stays_exposed_is_named_with_a_valid_hint(
    settings: tuple[str, ...], processes: int, expected: list[str]
) -> None:
    config = load_config(GPT, settings, processes)
    assert hints(config) == expected
    assert [line.rpartition("  -> ")[2] for line in host_warnings(config) if "a GPU has exposed tp's" in line] == [
        each.hint for each in exposed_collectives(config, 8)
    ]
    for hint in expected:
        if " or " not in hint:
            after = hints(load_config(GPT, [*settings, hint.replace(" ", "")], processes))
            assert hint not in after and set(after) <= set(expected)


@pytest.mark.parametrize(
    ("recipe", "fused"),
    [
        ("tensorwise", {"input", "gradient"}), ("delayed", {"input", "gradient"}), ("static", {"input", "gradient"}),
        ("rowwise", {"input"}), ("blockwise", set()),
    ],
)  # fmt: skip
def test_operands_are_fused_by_their_scales(recipe: str, fused: set[str]) -> None:
    config = load_config(GPT, [FP8, f"fp8.recipe={recipe}"], 1024)
    p = config.parallel
    assert {name for name in SENT if overlaps_on_gpus(p, 8, 512, name, fp8=config.fp8.facts)} == fused
    assert all(overlaps_on_gpus(p, 8, 512, name) for name in SENT), "layers in 16 bits"
    assert not any(overlaps_on_gpus(p, 4, 512, name) for name in SENT), "ranks of two hosts"
    told = [each.message for each in exposed_collectives(config, 8)]
    assert [[sent in each for each in told] for sent in SENT.values()] == [
        [name not in fused] * len(told) for name in SENT
    ]


def test_domino_ends_with_every_layer_that_is_recomputed() -> None:
    config = load_config(GPT, ["overlap.tp=domino", "batch.micro=2", "train.recompute=full"], 1024)
    assert hints(config) == ["train.recompute = selective"]
    assert hints(load_config(GPT, ["overlap.tp=domino", "batch.micro=2", "train.recompute=selective"], 1024)) == []


def test_runs_of_processors_have_no_such_warning() -> None:
    config = load_config(GPT, [MICRO, "train.precision=fp32"], 1024)
    assert hints(config) and not any("a GPU has exposed tp's" in line for line in host_warnings(config))


@pytest.mark.parametrize(("settings", "processes", "expected"), HINTS)
def test_a_planned_step_has_what_stays_exposed(settings: tuple[str, ...], processes: int, expected: list[str]) -> None:
    """The step lies between those of stacks that overlap with all GEMMs and with wgrad only, and a note says why."""
    config = load_config(GPT, settings, processes)
    hardware, stack = profiles.hardware("h100"), profiles.stack("megascale")
    steps = {}
    for name in ("large", "all", "backward"):
        overlaps = stack.overlaps.model_copy(update={"tp": name})
        plan = Plan(config, hardware, stack.model_copy(update={"overlaps": overlaps}))
        steps[name] = plan.estimate.step_s
        notes = [line.rpartition("  -> ")[2] for line in plan.notes if "a GPU has exposed tp's" in line]
        assert notes == ([each.hint for each in exposed_collectives(config, 8)] if name == "large" else [])
    assert steps["all"] <= steps["large"] <= steps["backward"]
    assert (steps["all"] < steps["large"]) == bool(expected)
    if expected and expected[0].startswith("batch.micro"):
        assert steps["large"] == steps["backward"]

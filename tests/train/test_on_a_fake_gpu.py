"""On a device other than a CPU, a step and an evaluation synchronize host and device once, and mix no devices."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from megascale.catalog.backends import BACKENDS
from megascale.catalog.recipes import RECIPES
from megascale.core.rank import Rank
from tests.marks import only_quick
from tests.runs import FAMILIES, config_of, settings
from tests.worlds import run_world

FP8 = {
    "train__precision": "fp8", "fp8__first_layers_bf16": 0, "fp8__last_layers_bf16": 0, "parallel__tp": 2,
    "parallel__sp": True, "train__recompute": "selective", "model__hidden_size": 256, "model__num_heads": 4,
    "model__num_kv_heads": 4, "model__ffn_size": 512, "model__seq_length": 128,
}  # fmt: skip
ONE = {"parallel__tp": 1, "parallel__sp": False}
EXPERTS = {
    "model__experts": 8, "model__experts_per_token": 4, "model__expert_ffn_size": 32, "model__shared_ffn_size": 32,
    "model__hidden_size": 64, "parallel__dp": 2, "parallel__ep": 2,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama fp32": {"train__precision": "fp32"},
    "gpt parallel block": {"model__block": "parallel"},
    "gpt parallel two norms block": {"model__block": "parallel_two_norms"},
    "llama post norm block": {"model__block": "post_norm"},
    "llama fog block": {"model__block": "fog", "model__qk_norm": "fixed", "model__residual_tau": 0.25},
    "llama unit scaling": {"model__block": "post_norm", "model__unit_scaling": True, "model__qk_norm": "tanh"},
    "llama sandwich block": {
        "model__block": "sandwich", "model__norm": "rmsnorm_1p", "model__activation": "geglu",
        "model__embedding_scale": 6.0, "model__logit_softcap": 30.0, "train__recompute": "full", "model__dropout": 0.1,
    },
    "llama window": {"model__window": 4},
    "gpt recompute selective": {"train__recompute": "selective", "model__dropout": 0.1},
    "llama recompute selective": {"train__recompute": "selective"},
    "gpt recompute full": {"train__recompute": "full", "model__dropout": 0.1},
    "llama pp2 tiles and offload": {
        "parallel__pp": 2, "train__memory": ["full_host"], "train__mlp_tiles": 2,
    },
    "llama dp2 zero1": {"parallel__dp": 2, "parallel__zero": 1},
    "gpt dp2 zero2": {"parallel__dp": 2, "parallel__zero": 2},
    "llama tp2 sp": {"parallel__tp": 2, "parallel__sp": True},
    "gpt tp2 sp dropout": {"parallel__tp": 2, "parallel__sp": True, "model__dropout": 0.1},
    "gpt pp2 tied": {"parallel__pp": 2, "model__tie_embeddings": True},
    "llama pp2 vpp2": {"parallel__pp": 2, "parallel__vpp": 2},
    "gpt tp2 pp2 dp2 zero2": {"parallel__tp": 2, "parallel__pp": 2, "parallel__dp": 2, "parallel__zero": 2},
    "gpt tp2 sp pp2 dp2 noise scale": {
        "parallel__tp": 2, "parallel__sp": True, "parallel__pp": 2, "parallel__dp": 2, "parallel__zero": 2,
        "train__noise_scale_every": 1,
    },
    "gpt lamb": {"optimizer__name": "lamb"},
    "llama pp2 dp2 fp32 lamb": {
        "parallel__pp": 2, "parallel__dp": 2, "parallel__zero": 1, "train__precision": "fp32",
        "optimizer__name": "lamb",
    },
    "gpt tp2 dp2 zero0 no overlap": {
        "parallel__tp": 2, "parallel__dp": 2, "parallel__zero": 0, "overlap__tp": False, "overlap__pp": False,
        "overlap__dp": False,
    },
    "llama experts": EXPERTS | {"train__recompute": "full", "model__balance_bias": True},
    "llama experts fp32 capacity": EXPERTS | {"train__precision": "fp32", "moe__capacity_factor": 1.0},
    "llama experts gathered": EXPERTS | {"moe__dispatcher": "all_gather"},
    "llama experts gathered in blocks": EXPERTS | {"moe__dispatcher": "all_gather", "moe__token_blocks": 2},
    "llama experts tp2 sp pp2 blocks": EXPERTS | {
        "moe__token_blocks": 2, "parallel__tp": 2, "parallel__sp": True, "parallel__pp": 2, "parallel__ep": 4,
        "moe__balance": "sequence",
    },
    **{
        f"llama fp8 {recipe}": FP8 | {"fp8__recipe": recipe} | (ONE if RECIPES[recipe].facts["whole"] else {})
        for recipe in RECIPES.names()
    },
    "gpt fp8 not cut": FP8 | ONE | {"train__recompute": "none"},
}  # fmt: skip


def configured(case: str, folder: Path) -> Any:
    """The smallest model that the layout allows, with the torch backend of every operation."""
    layout = CASES[case]
    chunks = layout.get("parallel__pp", 1) * layout.get("parallel__vpp", 1)
    changes = {
        "model__num_layers": chunks,
        "batch__global": 2 * layout.get("parallel__dp", 1),
        "train__precision": "bf16",
    }
    changes |= {f"backends__{operation}": "torch" for operation in BACKENDS}
    changes |= {"train__eval_every": 5, "train__eval_steps": 1} | layout
    return config_of(settings(FAMILIES[case.split()[0]], folder, **changes), folder).resolve(None)


def outcome(work: Callable[[], object]) -> str:
    """Call `work`. Returns the traceback of an exception, else ""."""
    try:
        work()
    except Exception:
        return traceback.format_exc()
    return ""


def error_of(text: str) -> str:
    """Name of the exception in a traceback, else ""."""
    names = re.findall(r"^([\w.]+)(?::|$)", text, re.MULTILINE)
    return names[-1].rpartition(".")[2] if names else ""


def step_and_evaluate(config: Any, rank: int) -> None:
    """Run a step and an evaluation; with delayed scaling two steps, because the second reads the amax history. In a
    layer with experts the host reads counts once in a forward, also with recomputation, and not in backward.
    """
    from megascale.train.evaluate import evaluate
    from megascale.train.step import train_step
    from tests.fakegpu import FakeGPU, build_fake, watched

    with (
        watched() as watch,
        patch.object(FakeGPU, "copy_to_host", autospec=True, side_effect=FakeGPU.copy_to_host) as read,
        patch.object(FakeGPU, "read_counts", autospec=True, side_effect=FakeGPU.read_counts) as counts,
        patch("megascale.ops.grouped_gemm.compute_capability", lambda device: FakeGPU.capability),
    ):
        run = build_fake(config, rank)
        assert all(block.attention._tp.gpu for stage in run.stages for block in stage.layers.values())
        watch.crossings.clear()
        steps = 1 + bool(run.fp8_state is not None and run.fp8_state.history.numel())
        for _ in range(steps):
            train_step(run, run.train_loader.batch(run.progress.samples))
        evaluate(run)
        copied_loads = rank == 0 and bool(config.model.experts)  # of a logged step, before the totals
        assert read.call_count == steps + 1 + copied_loads
        layers = sum(len(stage.layers) for stage in run.stages) if config.model.experts else 0
        assert counts.call_count == layers * config.num_microbatches * (steps + 1)


def run_cases(_: Rank, configs: dict[str, Any]) -> dict[str, str]:
    """Tracebacks of the first and the last rank of every case."""
    from tests.fakegpu import open_device

    open_device()
    return {
        name: "".join(
            outcome(lambda config=config, rank=rank: step_and_evaluate(config, rank))
            for rank in sorted({config.world_size - 1, *[0] * (config.parallel.pp > 1 or config.model.experts > 0)})
        )
        for name, config in configs.items()
    }


QUICK = (
    "llama sandwich block", "llama pp2 dp2 fp32 lamb", "llama fp8 delayed",
    "gpt tp2 sp pp2 dp2 noise scale", "llama experts", "llama experts gathered in blocks",
)  # fmt: skip


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, str]:
    """Tracebacks of the selected cases, from one process: the device type stays the process's accelerator."""
    folder = tmp_path_factory.mktemp("fake")
    cases = {item.callspec.params["case"] for item in request.session.items if "outcomes" in item.fixturenames}
    return run_world(1, run_cases, {case: configured(case, folder) for case in CASES if case in cases})[0]


@pytest.mark.parametrize("case", only_quick(CASES, *QUICK))
def test_a_step_waits_for_the_device_once(case: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[case], outcomes[case]


def reads_of_the_check(_: Rank, config: Any) -> list[str]:
    """Synchronizations of the check before a save."""
    from megascale.train.finite_check import check_state_finite
    from tests.fakegpu import build_fake, open_device, watched

    open_device()
    with watched() as watch:
        run = build_fake(config, 0)
        watch.crossings.clear()
        check_state_finite(run)
        crossings = watch.crossings.copy()
        watch.crossings.clear()
    return crossings


def test_the_check_of_the_state_reads_one_value(tmp_path: Path) -> None:
    ((read,),) = run_world(1, reads_of_the_check, configured("gpt", tmp_path))
    assert read.startswith("read: a number") and read.endswith("if not bool(nonfinite):")


# The watch detects faults.


def crossings(_: Rank) -> dict[str, str]:
    """Detected crossings of operations on the device: `read`, `copy`, or the name of an exception."""
    import torch

    from tests.fakegpu import open_device, watched

    device = open_device()
    with watched() as watch:
        here, there = torch.ones(3), torch.ones(3, 4, device=device)
        row, number = there[0], there[0, 0]
        pinned = here.pin_memory()
        works: dict[str, Callable[[], object]] = {
            "read item": lambda: number.item(),
            "read bool": lambda: bool(number),
            "read float": lambda: float(number),
            "read tolist": lambda: row.tolist(),
            "shape nonzero": lambda: row.nonzero(),
            "shape mask": lambda: row[row > 0],
            "read copy": lambda: row.cpu(),
            "read copy_": lambda: here.copy_(there[:, 0]),
            "read copy pinned": lambda: pinned.copy_(there[:, 0]),
            "mixed": lambda: there[:, 0] + here,
            "copy to": lambda: here.to(device),
            "copy to without a wait": lambda: here.to(device, non_blocking=True),
            "copy to from pinned": lambda: pinned.to(device),
            "copy copy_": lambda: there[:, 0].copy_(here),
            "copy a number": lambda: number.copy_(torch.ones(())),
            "copy tensor": lambda: torch.tensor([1.0, 2.0], device=device),
            "copy as_tensor": lambda: torch.as_tensor(1.0, device=device),
            "copy item": lambda: row.__setitem__(1, 2.0),
            "copy items chosen": lambda: row.__setitem__(row > 0, 2.0),
            "copy index": lambda: there[torch.tensor([0, 2])],
            "copy list": lambda: there[[0, 2]],
            "free pinned": lambda: pinned.to(device, non_blocking=True),
            "free pinned copy_": lambda: there[:, 0].copy_(pinned, non_blocking=True),
            "free fill": lambda: number.fill_(2.0),
            "free slice": lambda: there.__setitem__((slice(None), slice(2, None)), 2.0),
            "free item": lambda: row.__setitem__(1, number),
            "free where": lambda: torch.where(there > 0, there, 1.0),
            "free full": lambda: torch.full((), 2.0, device=device),
            "free draw": lambda: torch.rand(3, device=device, generator=torch.Generator(device)),
        }
        detected = {}
        for name, work in works.items():
            watch.crossings.clear()
            error = error_of(outcome(work))
            detected[name] = error or "".join({crossing.partition(":")[0] for crossing in watch.crossings})
        watch.crossings.clear()
    return detected


def test_all_crossings_and_nothing_else_are_detected() -> None:
    (detected,) = run_world(1, crossings)
    expected = {"read": "read", "mixed": "FakeTensorDeviceMismatchError", "copy": "copy", "free": ""}
    expected["shape"] = "DynamicOutputShapeException"
    assert not {name: crossing for name, crossing in detected.items() if crossing != expected[name.split()[0]]}


def faulty_steps(_: Rank, config: Any) -> dict[str, str]:
    """Detected crossings of steps with one injected fault."""
    import torch

    from megascale.train import step
    from megascale.train.step_totals import StepTotals
    from tests.fakegpu import FakeGPU, build_fake, open_device, watched

    open_device()

    def reduce(totals: StepTotals) -> Any:
        values = torch.zeros(len(totals._parts), dtype=torch.float64, device=totals._device)
        for index, value in enumerate(totals._parts.values()):
            values[index] = value
        return dict(zip(totals._parts, values, strict=True))

    def read_with_wait(device: Any, values: Any) -> Any:
        return lambda: [1 + x for x in values.tolist()]

    def planted(*faults: Any, hook: Any = None) -> str:
        with watched() as watch, ExitStack() as stack:
            run = build_fake(config, 0)
            if hook is not None:
                run.stages[0].layers["0"].register_forward_hook(lambda *call: call[2].register_hook(hook) and None)
            for fault in faults:
                stack.enter_context(fault)
            watch.crossings.clear()
            step.train_step(run, run.train_loader.batch(0))
            kinds = {crossing.partition(":")[0] for crossing in watch.crossings}
            watch.crossings.clear()
        return "".join(kinds)

    return {
        "none": planted(),
        "totals": planted(patch.object(StepTotals, "reduce", reduce)),
        "not pinned": planted(patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor)),
        "read": planted(patch.object(FakeGPU, "copy_to_host", read_with_wait)),
        "read in a backward": planted(hook=lambda grad: grad * grad.sum().item()),
        "copy in a backward": planted(hook=lambda grad: grad * torch.ones(grad.shape).to(grad)),
        "number in a backward": planted(hook=lambda grad: grad.view(-1).__setitem__(0, 0.0)),
    }


def test_a_fault_anywhere_in_a_step_is_detected(tmp_path: Path) -> None:
    (detected,) = run_world(1, faulty_steps, configured("gpt", tmp_path))
    assert detected == {
        "none": "",
        "totals": "copy",
        "not pinned": "copy",
        "read": "read",
        "read in a backward": "read",
        "copy in a backward": "copy",
        "number in a backward": "copy",
    }

"""A dry run as any rank says what that rank of a real run does: every communication, FLOP and byte of state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from megascale.core.rank import Rank
from tests.marks import only_quick
from tests.memory import peak_bytes
from tests.runs import FAMILIES, build_run, config_of, settings
from tests.worlds import run_world


class Seen(NamedTuple):
    """Of a rank's second step: communications, FLOPs by operator, bytes of state, the most bytes beyond them."""

    calls: Sequence[tuple[Any, ...]]
    flops: dict[str, int]
    state: dict[str, int]
    peak: int


def seen(rank: Rank, config: Any) -> Seen:
    """What a real rank does."""
    from megascale.dryrun.account import Accountant, Ledger
    from megascale.train.step import train_step

    run = build_run(rank, config)
    step(run, train_step)
    ledger = Ledger()
    with Accountant(ledger):
        step(run, train_step)
    calls = [
        (event.group, event.name, (event.part, event.layer, event.stage, event.direction), event.bytes, event.peer)
        for event in run.mesh.recorder.events()
        if event.group and event.step == 2
    ]
    peak = peak_bytes(lambda: step(run, train_step))
    buckets, shards = run.gradients.buckets, run.optimizer.shards
    state = {
        "parameters": sum(bucket.bytes["weights"] for bucket in buckets),
        "gradients": sum(bucket.bytes["gradients"] for bucket in buckets),
        "optimizer": sum(shard.bytes for shard in shards),
    }
    return Seen(calls, dict(ledger.account.flops), state, peak)


def step(run: Any, train_step: Any) -> None:
    train_step(run, run.train.batch(run.progress.samples))
    run.gradients.finish_gather()
    run.pipeline.finish_sends()


CASES: dict[str, dict[str, Any]] = {
    "gpt one": {},
    "llama tp2": {"parallel__tp": 2},
    "gpt tp2 sp": {"parallel__tp": 2, "parallel__sp": True, "model__dropout": 0.1},
    "llama pp2": {"parallel__pp": 2, "parallel__schedule": "gpipe"},
    "gpt pp2 vpp2": {"parallel__pp": 2, "parallel__vpp": 2, "model__block": "parallel"},
    "llama dp2": {"parallel__dp": 2, "parallel__zero": 1},
    "gpt dp2 zero2": {"parallel__dp": 2, "parallel__zero": 2},
    "llama fp8": {"parallel__tp": 2, "train__precision": "fp8", "fp8__recipe": "delayed", "model__ffn_size": 64},
    "gpt fp8 recompute": {  # most is held in the loss: in products in 8 bits a CPU widens operands inside the operator
        "parallel__tp": 2,
        "train__precision": "fp8",
        "train__recompute": "full",
        "model__vocab_size": 8192,
    },
    "gpt recompute": {"parallel__tp": 2, "parallel__sp": True, "train__recompute": "full"},
    "llama tp2 sp pp2": {"parallel__tp": 2, "parallel__sp": True, "parallel__pp": 2, "parallel__vpp": 2},
    "gpt tp2 sp pp2": {"parallel__tp": 2, "parallel__sp": True, "parallel__pp": 2, "model__tie_embeddings": True},
    "llama pp2 dp2": {"parallel__pp": 2, "parallel__dp": 2, "parallel__zero": 2, "optimizer__name": "lamb"},
    "llama no overlap": {"parallel__tp": 2, "parallel__dp": 2, **{f"overlap__{x}": False for x in ("tp", "pp", "dp")}},
}


@pytest.mark.parametrize("case", only_quick(list(CASES), "llama pp2 dp2"))
def test_it_is_what_a_real_rank_does(case: str, tmp_path: Any) -> None:
    from megascale.dryrun.run import dry_run

    size = {"model__num_layers": 8, "model__seq_length": 64, "model__hidden_size": 64}
    changes = {"train__precision": "bf16", **size, **CASES[case]}
    config = config_of(settings(FAMILIES[case.split()[0]], tmp_path, **changes), tmp_path)
    # of messages that are under way, which are kept, there are as many as the others are late
    late = 4 * 2 * config.model.seq_length * config.model.hidden_size if config.parallel.pp > 1 else 0
    for rank, real in enumerate(run_world(config.world, seen, config)):
        for rehearse in (True, False):
            dry = dry_run(config, rank, piecewise=False, rehearse=rehearse)
            assert [tuple(call) for call in dry.calls] == list(real.calls)
            assert dry.flops == real.flops
            assert {kind: dry.state[kind] for kind in real.state} == real.state
            assert dry.peak.total() - dry.state.total() == pytest.approx(real.peak, rel=0.03, abs=late)


@pytest.mark.parametrize("case", ["gpt recompute", "gpt fp8 recompute"])
def test_modules_that_are_alike_do_what_each_would(case: str, tmp_path: Any) -> None:
    """Weights are cast once a step and gradients written once, then added to, also where a backward recomputes."""
    from megascale.dryrun.run import dry_run

    size = {"model__num_layers": 6, "model__seq_length": 64, "model__hidden_size": 64}
    tree = settings(FAMILIES["gpt"], tmp_path, **{"train__precision": "bf16", **size, **CASES[case]})
    config = config_of(tree, tmp_path)
    once, each = (dry_run(config, 0, rehearse=rehearse) for rehearse in (True, False))
    assert once.calls == each.calls
    assert once.flops == each.flops
    assert once.peak.total() == pytest.approx(each.peak.total(), rel=1e-4)

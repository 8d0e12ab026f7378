"""A dry run equals the rank of a real run: every communication, every FLOP, every byte of state, and the peak."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from megascale.core.rank import Rank
from megascale.layout.chunks import token_ranks
from megascale.plan.account.memory import TOKEN_IDS
from tests.marks import only_quick
from tests.memory import peak_bytes
from tests.recorded_events import recorded_events
from tests.runs import FAMILIES, build_run, config_of, settings
from tests.worlds import run_world


class StepCosts(NamedTuple):
    """Costs of a rank's second step: communications, FLOPs by operator, bytes of state, peak bytes beyond the state."""

    calls: Sequence[tuple[Any, ...]]
    flops: dict[str, int]
    state: dict[str, int]
    peak: int


def real_costs(rank: Rank, config: Any) -> StepCosts:
    """Measure the costs of a real rank."""
    from megascale.device import Device
    from megascale.plan.dryrun.resource_counter import CountingRecorder, ResourceCounterMode
    from megascale.train.step import train_step
    from tests.parallel.test_activation_store import OtherBuffers

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Device, "host_buffers", lambda device: OtherBuffers())  # not counted as the device's
        run = build_run(rank, config)
    step(run, train_step)
    recorder = CountingRecorder()
    with ResourceCounterMode(recorder):
        step(run, train_step)
    calls = [
        (event.group, event.name, (event.part, event.layer, event.stage, event.direction), event.bytes, event.peer)
        for event in recorded_events(run.mesh.recorder)
        if event.group and event.step == 2
    ]
    peak = peak_bytes(lambda: step(run, train_step))
    buckets, shards = run.buffers.buckets, run.optimizer.shards
    state = {
        "parameters": sum(bucket.weights.nbytes for bucket in buckets),
        "gradients": sum(bucket.grad.untyped_storage().nbytes() for bucket in buckets),
        "optimizer": sum(shard.bytes for shard in shards),
    }
    return StepCosts(calls, dict(recorder.counts.flops), state, peak)


def step(run: Any, train_step: Any) -> None:
    train_step(run, run.train_loader.batch(run.progress.samples))
    run.buffers.finish_param_gather()
    run.pipeline.finish_sends()


CASES: dict[str, dict[str, Any]] = {
    "gpt one": {},
    "llama tp2": {"parallel__tp": 2},
    "gpt tp2 sp": {"parallel__tp": 2, "parallel__sp": True, "model__dropout": 0.1},
    "llama pp2": {"parallel__pp": 2, "parallel__schedule": "gpipe"},
    "gpt pp2 vpp2": {"parallel__pp": 2, "parallel__vpp": 2, "model__block": "parallel"},
    "llama dp2": {"parallel__dp": 2, "parallel__zero": 1},
    "gpt dp2 zero2": {"parallel__dp": 2, "parallel__zero": 2},
    "gpt dp2 zero3": {"parallel__dp": 2, "parallel__zero": 3},
    "llama dp2 pp2 vpp2 zero3": {
        "parallel__dp": 2,
        "parallel__pp": 2,
        "parallel__vpp": 2,
        "parallel__zero": 3,
        "parallel__reshard": "microbatch",
        "train__recompute": "full",
    },
    "llama dp2 v zero3": {
        "parallel__dp": 2,
        "parallel__pp": 2,
        "parallel__vpp": 2,
        "parallel__schedule": "zb_v",
        "parallel__zero": 3,
    },
    "llama fp8": {"parallel__tp": 2, "train__precision": "fp8", "fp8__recipe": "delayed", "model__ffn_size": 64},
    "gpt fp8 recompute": {  # the peak is in the loss: in FP8 GEMMs a CPU casts operands inside the operator
        "parallel__tp": 2,
        "train__precision": "fp8",
        "train__recompute": "full",
        "model__vocab_size": 8192,
    },
    "gpt recompute": {"parallel__tp": 2, "parallel__sp": True, "train__recompute": "full"},
    "gpt recompute zb": {"parallel__schedule": "interleaved_zb", "train__recompute": "full"},
    "llama tp2 sp pp2": {"parallel__tp": 2, "parallel__sp": True, "parallel__pp": 2, "parallel__vpp": 2},
    "gpt tp2 sp pp2": {"parallel__tp": 2, "parallel__sp": True, "parallel__pp": 2, "model__tie_embeddings": True},
    "llama pp2 dp2": {
        "parallel__pp": 2,
        "parallel__dp": 2,
        "parallel__zero": 2,
        "optimizer__name": "lamb",
        "batch__global": 4,
        "model__num_layers": 4,
    },
    "llama zb_h1": {"parallel__pp": 2, "parallel__schedule": "zb_h1", "parallel__tp": 2, "parallel__sp": True},
    "gpt interleaved_zb": {"parallel__pp": 2, "parallel__vpp": 2, "parallel__schedule": "interleaved_zb"},
    "llama pp2 vocabulary": {"parallel__pp": 2, "parallel__vocab_pp": 2, "batch__global": 4},
    "gpt pp2 v vocabulary": {
        "parallel__pp": 2,
        "parallel__vpp": 2,
        "parallel__schedule": "zb_v",
        "parallel__vocab_pp": 2,
    },
    "gpt tp2 sp pp2 vocabulary": {"parallel__tp": 2, "parallel__sp": True, "parallel__pp": 2, "parallel__vocab_pp": 1},
    "llama cp2 ring": {"parallel__cp": 2, "parallel__cp_mode": "ring"},
    "gpt cp2 allgather": {"parallel__cp": 2, "parallel__cp_mode": "allgather", "train__recompute": "full"},
    "gpt memory": {
        "parallel__pp": 2,
        "train__memory": ["host", "keep", "full", "host", "host"],
        "batch__global": 4,
    },
    "gpt memory shares": {
        "parallel__tp": 2,
        "parallel__sp": True,
        "train__memory": [{"host": 0.5}],
        "train__mlp_tiles": 4,
    },
    "gpt memory v": {
        "parallel__pp": 2,
        "parallel__vpp": 2,
        "parallel__schedule": "zb_v",
        "train__memory": ["host", "host", "keep"],
    },
    "llama no overlap": {"parallel__tp": 2, "parallel__dp": 2, **{f"overlap__{x}": False for x in ("tp", "pp", "dp")}},
}


@pytest.mark.parametrize("case", only_quick(list(CASES), "llama pp2 dp2", "gpt memory"))
def test_a_dry_run_equals_a_real_rank(case: str, tmp_path: Any) -> None:
    from megascale.plan.dryrun.dry_run import dry_run

    size = {"model__num_layers": 8, "model__seq_length": 64, "model__hidden_size": 64}
    changes = {"train__precision": "bf16", **size, **CASES[case]}
    config = config_of(settings(FAMILIES[case.split()[0]], tmp_path, **changes), tmp_path)
    # the number of pipeline messages in flight, whose tensors are held, depends on the peers' delays
    in_flight = 4 * 2 * config.model.seq_length * config.model.hidden_size if config.parallel.pp > 1 else 0
    tokens = TOKEN_IDS * config.num_microbatches * config.batch.micro * config.model.seq_length // config.parallel.cp
    for rank, real in enumerate(run_world(config.world_size, real_costs, config)):
        for replay in (True, False):
            dry = dry_run(config, rank, collectives_in_pieces=False, replay_modules=replay)
            assert [tuple(call) for call in dry.calls] == list(real.calls)
            assert dry.flops == real.flops
            assert {kind: dry.state[kind] for kind in real.state} == real.state
            # the real step's tokens have been read ahead, before its peak is measured
            expected = real.peak + (tokens if dry.coord.pp in token_ranks(config.model, config.parallel) else 0)
            assert dry.peak.total() - dry.state.total() == pytest.approx(expected, rel=0.03, abs=in_flight)


MOE = {"experts": 4, "expert_ffn_size": 32, "dense_layers": 1, "shared_ffn_size": 32, "bias": False}


@pytest.mark.parametrize("recompute", only_quick(["none", "full"], "full"))
def test_replayed_experts_keep_their_routes(recompute: str, tmp_path: Any) -> None:
    from megascale.plan.dryrun.dry_run import dry_run

    size = {"num_layers": 3, "seq_length": 32, "hidden_size": 64}
    layout = {"batch__global": 4, "parallel__dp": 2, "parallel__ep": 2, "train__precision": "bf16"}
    tree = settings(FAMILIES["llama"] | size | MOE, tmp_path, **layout, train__recompute=recompute)
    config = config_of(tree, tmp_path)
    replayed, real = (dry_run(config, 1, replay_modules=replay) for replay in (True, False))
    assert replayed.calls == real.calls
    assert replayed.flops == real.flops
    assert replayed.peak.total() == pytest.approx(real.peak.total(), rel=1e-4)


@pytest.mark.parametrize("case", only_quick(["gpt recompute", "gpt recompute zb", "gpt fp8 recompute"]))
def test_replayed_modules_cost_what_real_modules_cost(case: str, tmp_path: Any) -> None:
    """Weights are quantized once a step and gradients written once, then added to, also with recomputation."""
    from megascale.plan.dryrun.dry_run import dry_run

    size = {"model__num_layers": 6, "model__seq_length": 64, "model__hidden_size": 64}
    tree = settings(FAMILIES["gpt"], tmp_path, **{"train__precision": "bf16", **size, **CASES[case]})
    config = config_of(tree, tmp_path)
    replayed, real = (dry_run(config, 0, replay_modules=replay) for replay in (True, False))
    assert replayed.calls == real.calls
    assert replayed.flops == real.flops
    assert replayed.peak.total() == pytest.approx(real.peak.total(), rel=1e-4)

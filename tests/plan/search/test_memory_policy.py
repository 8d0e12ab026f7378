"""The policies that `train.memory = "auto"` chooses equal an exhaustive search, and fit as dry runs measure.

Times are those of the simulator, of the choice and of all others alike: no GPU measured them.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megascale.catalog.schedules import SCHEDULES
from megascale.config.loading import load_config, load_config_tree
from megascale.config.rules import RULES, run_rules
from megascale.config.run import RunConfig
from megascale.config.train import LayerPolicy
from megascale.core.errors import ConfigError
from megascale.plan.account.memory import JobMemory
from megascale.plan.search.memory_policy import (
    MEMORY_FRACTION,
    least_bytes,
    legal,
    limits,
    mixes,
    policy_options,
    refuse_small_limit,
    totals,
    with_memory,
    with_policies,
)
from megascale.plan.search.plan import Plan
from megascale.plan.search.search import search
from megascale.plan.simulate import profiles
from megascale.plan.simulate.chunk_time import layer_times
from megascale.plan.simulate.profiles import Hardware
from megascale.plan.simulate.step_time import StepParts
from tests.drawn import ranks_of
from tests.marks import only_quick

H100, STACK = profiles.hardware("h100"), profiles.stack("megascale")
CONFIG, DRAWS = "configs/gpu/llama3-8b.toml", 40


def on_link(bandwidth: float | None) -> Hardware:
    """Return H100s with a link to the host of this bandwidth."""
    return H100.model_copy(update={"device": H100.device.model_copy(update={"host_bandwidth": bandwidth})})


def job(**sections: dict[str, Any]) -> RunConfig:
    """Return a llama of 4 layers with policies to choose, with other keys of sections."""
    tree: dict[str, Any] = {
        "name": "test",
        "model": {
            "num_layers": 4, "hidden_size": 4096, "num_heads": 32, "num_kv_heads": 8, "ffn_size": 14336,
            "vocab_size": 8192, "seq_length": 4096, "norm": "rmsnorm", "activation": "swiglu", "position": "rope",
            "bias": False, "tie_embeddings": False,
        },
        "batch": {"micro": 1, "global": 8},
        "train": {"steps": 10, "precision": "bf16", "memory": "auto"},
        "optimizer": {"lr": 1e-3},
        "data": {"mock": True},
        "checkpoint": {"every": 0},
    }  # fmt: skip
    for name, keys in sections.items():
        tree[name] = tree.get(name, {}) | keys
    return load_config_tree(tree, "drawn")


def drawn(seed: int) -> tuple[RunConfig, Hardware]:
    """Draw a job with a limit of memory, and hardware with a link to the host."""
    draw = random.Random(seed)
    pp, tp = draw.choice([(1, 1), (1, 2), (2, 1), (2, 2)])
    heads, layers = draw.choice([16, 32]), draw.choice([2, 3, 4]) if pp == 1 else 4
    model = {
        "num_layers": layers, "hidden_size": heads * 128, "num_heads": heads, "num_kv_heads": draw.choice([4, heads]),
        "ffn_size": heads * 128 * draw.choice([2, 3, 4]), "seq_length": draw.choice([2048, 4096, 8192]),
        "activation": draw.choice(["swiglu", "gelu"]), "norm": draw.choice(["rmsnorm", "layernorm"]),
    }  # fmt: skip
    parallel = {"pp": pp, "tp": tp, "sp": tp > 1 and draw.random() < 0.5, "dp": draw.choice([1, 2]), "zero": 1}
    micro, tiles = draw.choice([1, 2]), draw.choice([1, 1, 4])
    batch = {"micro": micro, "global": micro * parallel["dp"] * 4}
    config = job(model=model, parallel=parallel, batch=batch, train={"mlp_tiles": tiles})
    hardware = on_link(draw.choice([None, 8e9, 32e9, 64e9, 200e9]))
    return between(config, 1.05 * draw.random()), hardware


def given(config: RunConfig, policies: Sequence[LayerPolicy]) -> RunConfig:
    return config.model_copy(update={"train": with_memory(config.train, policies)})


def limited(config: RunConfig, limit: int) -> RunConfig:
    return config.model_copy(update={"train": config.train.model_copy(update={"memory_limit": limit})})


def between(config: RunConfig, share: float) -> RunConfig:
    """Limit a job's memory to the least that its fullest rank needs without a store, and a share of what it saves."""
    most, least = (JobMemory(given(config, [policy])).fullest().total for policy in ("keep", "full"))
    return limited(config, math.ceil((least + share * (most - least)) / MEMORY_FRACTION) + 1)


def fastest_of_all(config: RunConfig, hardware: Hardware) -> float:
    """Try all policies of all layers; return the seconds of the fastest step that fits, infinite without one."""
    best, stages, job = math.inf, range(config.parallel.pp), JobMemory(config, STACK.storage)
    time, (limit, host_limit) = layer_times(StepParts(config, hardware, STACK).layers), limits(config, hardware)
    options = [[policy for policy, _ in policy_options(job, hardware, time, stage)] for stage in stages]
    of_layer = {layer: options[stage] for stage in stages for _, layer, *_ in job.layers(stage)}
    seconds = dict[tuple[float, ...], float]()
    for policies in itertools.product(*(of_layer[layer] for layer in sorted(of_layer))):
        chosen = given(config, policies)
        memory = JobMemory(chosen, STACK.storage)
        if all(memory.rank(stage).total <= limit for stage in stages) and all(
            memory.moved_bytes(stage, "host") <= host_limit for stage in stages
        ):
            parts = StepParts(chosen, hardware, STACK)
            passes = tuple(pair.total for pair in parts.pairs.values())
            best = min(best, seconds.setdefault(passes, parts.step_s) if passes not in seconds else seconds[passes])
    return best


@pytest.mark.parametrize("seed", only_quick(range(DRAWS), 0, 1))
def test_the_choice_equals_an_exhaustive_search(seed: int) -> None:
    config, hardware = drawn(seed)
    best = fastest_of_all(config, hardware)
    try:
        chosen = with_policies(config, hardware, STACK)
    except ConfigError:
        assert best == math.inf
        return
    assert StepParts(chosen, hardware, STACK).step_s == pytest.approx(best, rel=1e-6)
    assert JobMemory(chosen, STACK.storage).fullest().total <= limits(config, hardware)[0]


@pytest.mark.parametrize("seed", only_quick(range(DRAWS), 0))
def test_what_is_refused_on_any_hardware_does_not_fit(seed: int) -> None:
    config, hardware = drawn(seed)
    limit = int((config.train.memory_limit or 0) * random.Random(seed).uniform(0.5, 1))
    try:
        refuse_small_limit(config, limit)
    except ConfigError:
        with pytest.raises(ConfigError, match="no policies fit"):
            with_policies(limited(config, limit), hardware, STACK)


@pytest.mark.parametrize("schedule", SCHEDULES.names())
def test_a_rank_needs_no_less_than_its_bound(schedule: str) -> None:
    """With two chunks a rank, or the number that the schedule has."""
    layout = {"pp": 2, "vpp": SCHEDULES[schedule].facts["v"] or 2, "schedule": schedule}
    uniform = JobMemory(job(parallel=layout, train={"mlp_tiles": 4}))
    jobs = [each for _, each in legal(uniform, ["keep", "selective", "full", "host", {"host": 0.25}])]
    for stage, own in itertools.product(range(2), jobs):
        beside, live = least_bytes(jobs, stage)
        saved = sum(count * unit.saved for count, (*_, unit) in zip(live, own.layers(stage), strict=True))
        assert 0 < beside + saved <= own.rank(stage).total


def test_mixes_are_all_counts_of_options_and_small() -> None:
    """Of a deep model those of up to three options."""
    for layers, options in itertools.product((1, 2, 5), (1, 2, 4)):
        mixed = mixes(layers, options)
        chosen = [tuple(np.repeat(range(options), np.diff(begins))) for begins in mixed]
        assert sorted(chosen) == [*itertools.combinations_with_replacement(range(options), layers)]
        values = np.arange(options * layers).reshape(options, layers) ** 2
        sums = [sum(values[option, layer] for layer, option in enumerate(mix)) for mix in chosen]
        assert totals(mixed, values).tolist() == sums
    deep = mixes(126, 9)
    assert len(deep) == 9 + 36 * 125 + 84 * math.comb(125, 2) and deep.nbytes < 16 << 20


@pytest.mark.parametrize("seed", only_quick(range(DRAWS), 0))
def test_the_choice_fits_as_a_dry_run_measures(seed: int) -> None:
    """The planned peak is within 5% of the measured one, which is never over the limit."""
    from megascale.plan.dryrun.dry_run import dry_run

    config, hardware = drawn(seed)
    chosen = with_policies(config, hardware, STACK)
    for rank in ranks_of(chosen):
        dry = dry_run(chosen, rank)
        planned = JobMemory(chosen).rank(dry.coord.pp).total
        assert dry.peak.total() <= (config.train.memory_limit or 0)
        assert planned == pytest.approx(dry.peak.total(), rel=0.05), chosen.train.memory


def test_more_memory_is_never_slower_and_the_most_keeps_all() -> None:
    times = list[float]()
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        config = between(job(), share)
        chosen = with_policies(config, on_link(None), STACK)
        times.append(StepParts(chosen, H100, STACK).step_s)
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]
    assert chosen.train.memory == ["keep"] * 4
    assert with_policies(config, on_link(None), STACK) == chosen  # the same again


def test_a_fast_link_moves_what_a_slow_one_recomputes() -> None:
    tight = between(job(model={"num_layers": 12}, train={"recompute_ops": ["norm", "activation"]}), 0.3)
    slow, fast = (with_policies(tight, on_link(bandwidth), STACK).train.memory for bandwidth in (1e9, 1e12))
    assert "host" not in (slow or ())
    assert "host" in (fast or ())
    small = on_link(1e12).model_copy(update={"node": H100.node.model_copy(update={"memory": 1 << 30})})
    assert "host" not in (with_policies(tight, small, STACK).train.memory or ())  # the host has no room


def test_what_does_not_fit_is_refused_with_the_least_that_would() -> None:
    config = limited(job(), 1 << 30)
    with pytest.raises(ConfigError, match=r"no policies fit: a rank of stage 0 needs \S+ GiB of 1003.52 MiB"):
        with_policies(config, H100, STACK)


def test_a_choice_is_legal_without_the_keys_of_the_search() -> None:
    """A run records it, and is resumed by it."""
    config = limited(job(train={"recompute_ops": ["norm"]}), 60 << 30)
    chosen = with_policies(config, H100, STACK)
    assert not any(run_rules(RULES, dict(chosen)))
    assert chosen.train.memory_limit is None
    assert with_policies(chosen, H100, STACK) == chosen


def test_nvme_is_chosen_only_with_a_folder(tmp_path: Any) -> None:
    """Files wear drives out."""
    config, quick = job(model={"num_layers": 12}), on_link(1e12)
    drives = quick.node.drives.model_copy(update={"write": 1e12, "read": 1e12})
    quick = quick.model_copy(update={"node": quick.node.model_copy(update={"drives": drives, "memory": 1 << 30})})
    tight = between(config, 0.3)
    assert "nvme" not in (with_policies(tight, quick, STACK).train.memory or ())
    folder = tight.model_copy(update={"train": tight.train.model_copy(update={"memory_dir": str(tmp_path)})})
    plan = Plan.of(folder, quick, STACK)
    assert "nvme" in (plan.config.train.memory or ())
    assert plan.wear is not None
    written = plan.wear.step * plan.config.world_size * 86400 / plan.estimate.step_s
    assert plan.wear.day == pytest.approx(written)
    assert plan.wear.days == pytest.approx(drives.count * drives.rated_bytes / written)
    slower = replace(plan, hardware=H100)
    assert slower.estimate.causes["offload"] > 0 == plan.estimate.causes["offload"]


@pytest.mark.slow
def test_a_search_of_layouts_gives_policies_to_the_fastest() -> None:
    """None is slower than with the same recomputation in all layers."""
    words, fixed = ["batch.global=16"], ["parallel.cp", "parallel.zero", "parallel.pp"]
    small = profiles.hardware("a100-40g")
    uniform = search(load_config(CONFIG, words), 8, small, STACK, fixed)
    chosen = search(load_config(CONFIG, [*words, "train.memory=auto"]), 8, small, STACK, fixed)
    steps = [[plan.parts.step_s for plan in result.best] for result in (chosen, uniform)]
    assert all(one <= two * (1 + 1e-9) for one, two in zip(*steps, strict=True))
    assert sum(steps[0]) < sum(steps[1])
    assert all(plan.fits and len(plan.config.train.memory or ()) == 32 for plan in chosen.best)


def test_a_share_that_nearly_hides_is_an_option() -> None:
    """A quarter of an MLP that adds 1% to a layer is faster than layers that are recomputed."""
    keys = ["model.seq_length=32768", "batch.global=8", "train.mlp_tiles=4", "train.memory=auto", "parallel.dp=4"]
    config = limited(load_config(CONFIG, keys), 45_000_000_000)
    chosen, share = with_policies(config, H100, STACK), given(config, [{"host": 0.25}])
    seconds, of_share = (StepParts(each, H100, STACK).step_s for each in (chosen, share))
    assert JobMemory(share).fullest().total < config.train.memory_limit * MEMORY_FRACTION
    assert seconds <= of_share

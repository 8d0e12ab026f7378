"""Islands: groups that cross them share their links; stages take the time of the islands in which they lie."""

from __future__ import annotations

from pathlib import Path

import pytest

from megascale.config.loading import load_config
from megascale.config.parallel import ParallelConfig
from megascale.config.run import RunConfig
from megascale.core.errors import ConfigError
from megascale.layout.parameters import parameter_count
from megascale.layout.parts.microbatch_sizes import CommOp
from megascale.plan.search.plan import Plan
from megascale.plan.search.search import search
from megascale.plan.simulate import profiles
from megascale.plan.simulate.islands import by_stage, far_message, outer_seconds, stage_islands
from megascale.plan.simulate.link_time import ExpertRoute, group_route, neighbour_route
from megascale.plan.simulate.profiles import Hardware, Islands

H100, STACK = profiles.hardware("h100"), profiles.stack("megascale")
SHARE = H100.attained.network
FAR = Islands(devices=32, bandwidth=25e9, latency=1e-3)
TWO = H100.model_copy(update={"islands": FAR})


def with_islands(**keys: object) -> Hardware:
    return H100.model_copy(update={"islands": FAR.model_copy(update=keys)})


MIXED = with_islands(hardware=["h100", "a100-80g"])


def run_of(*overrides: str, world: int = 64) -> RunConfig:
    keys = ["parallel.tp=2", "parallel.pp=4", "batch.global=64", "batch.micro=1", *overrides]
    return load_config("configs/gpu/llama3-8b.toml", keys, world_size=world)


def test_groups_across_islands_share_their_links() -> None:
    inside = group_route(TWO, 16, 2, 64)
    assert inside == group_route(H100, 16, 2, 64)
    across = group_route(TWO, 32, 2, 64)
    assert (across.bandwidth, across.islands) == (pytest.approx(25e9 * SHARE / 2), 2)
    nodes = 7 * H100.network.latency + 24 * H100.node.latency
    ring = 31 / 32 * 1e9 / across.bandwidth + nodes + 1e-3
    assert across.collective("all_gather", 1e9, 32) == pytest.approx(ring)
    assert across.collective("all_reduce", 1e9, 32) == pytest.approx(2 * ring)
    assert across.collective("all_reduce", 0.0, 32) == pytest.approx(2 * (nodes + 1e-3)), "no tree, of fewer hops"
    assert group_route(TWO, 24, 2, 96).bandwidth == pytest.approx(25e9 * SHARE / 4), "two runs end in an island"
    assert group_route(TWO, 12, 2, 24) == group_route(H100, 12, 2, 24), "a job in a single island"


def test_stages_in_islands() -> None:
    assert stage_islands(TWO, ParallelConfig(dp=16, pp=4), 64) == [range(1), range(1), range(1, 2), range(1, 2)]
    assert stage_islands(TWO, ParallelConfig(dp=64, pp=1), 64) == [range(2)]
    assert stage_islands(TWO, ParallelConfig(dp=16, pp=4, far_axis="dp"), 64) == [range(2)] * 4
    assert stage_islands(H100, ParallelConfig(dp=16, pp=4), 64) == [range(1)] * 4
    assert stage_islands(TWO, ParallelConfig(dp=16, pp=2), 32) == [range(1)] * 2


def test_dp_across_islands_cuts_stages() -> None:
    p = ParallelConfig(tp=2, dp=8, pp=4, far_axis="dp")
    seen = by_stage(TWO, p, 64)
    assert seen.islands == FAR.model_copy(update={"devices": 8, "bandwidth": 25e9 / 4})
    route = group_route(seen, 8, 2, 64)
    assert (route.bandwidth, route.islands) == (pytest.approx(25e9 * SHARE / 8), 2), "2 groups of each of 4 stages"
    assert by_stage(TWO, p.model_copy(update={"far_axis": "pp"}), 64) is TWO


def test_messages_between_islands_share_the_link_of_all_ranks_of_a_stage() -> None:
    p, near = ParallelConfig(tp=2, dp=8, pp=4), neighbour_route(TWO, 16, 64)
    assert far_message(TWO, near, p, 64, 10**6) == pytest.approx(1e6 / (25e9 * SHARE / 16) + 1e-3)
    assert far_message(H100, near, p, 64, 10**6) == near.message(10**6)


def test_experts_across_islands() -> None:
    p, sent = ParallelConfig(dp=64, ep=64), CommOp("ep", "all_to_all", 10**9, "dispatch")
    seconds = ExpertRoute.of_layout(TWO, p, 64).seconds(sent)
    assert seconds == pytest.approx(1e9 * 56 / 63 / (25e9 * SHARE / 32) + 1e-3)


def test_a_rail_only_network_relays_what_goes_to_other_rails() -> None:
    fast = {"bandwidth": 8 * 450e9}  # the links of a node are the limit
    both = [
        H100.model_copy(update={"network": H100.network.model_copy(update=fast | {"rail_only": rails})})
        for rails in (False, True)
    ]
    p, sent = ParallelConfig(dp=16, ep=16), CommOp("ep", "all_to_all", 10**9, "dispatch")
    plain, rails = (ExpertRoute.of_layout(hardware, p, 16).seconds(sent) for hardware in both)
    relayed = (7 / 15 + 8 / 15 * 7 / 8) * 1e9 / (450e9 * H100.attained.link) + H100.network.latency
    assert rails == pytest.approx(relayed) and plain < rails


def test_the_axis_across_islands_decides() -> None:
    """pp sends little over a slow link, dp much; without islands the axis has no effect."""
    near, pp, dp = (
        Plan(run_of(f"parallel.far_axis={axis}"), hardware, STACK).estimate
        for hardware, axis in ((H100, "dp"), (TWO, "pp"), (TWO, "dp"))
    )
    assert near.step_s < pp.step_s < dp.step_s / 2
    assert pp.causes["dp"] == pytest.approx(near.causes["dp"]) and dp.causes["pp"] == pytest.approx(near.causes["pp"])
    assert sum(pp.causes.values()) == pytest.approx(pp.step_s) and sum(dp.causes.values()) == pytest.approx(dp.step_s)


def test_a_stage_takes_the_time_of_its_island() -> None:
    fast, slow = (Plan(run_of(), profiles.hardware(name), STACK).parts for name in ("h100", "a100-80g"))
    mixed = Plan(run_of(), MIXED, STACK)
    assert [mixed.parts.pairs[rank, 0] for rank in range(4)] == [
        (fast if rank < 2 else slow).pairs[rank, 0] for rank in range(4)
    ]
    assert mixed.parts.slowness == pytest.approx([fast.slowness[0]] * 2 + [slow.slowness[0]] * 2)
    across = Plan(run_of("parallel.far_axis=dp"), MIXED, STACK).parts
    assert across.pairs == slow.pairs, "every stage waits for its slow ranks"
    peak = mixed.estimate.tokens_per_s / mixed.estimate.mfu_full
    assert peak == pytest.approx(
        sum(part.estimate.tokens_per_s / part.estimate.mfu_full / 2 for part in (fast, slow))
    ), "MFU is of the peaks of all devices"
    assert mixed.memory_limit == min(H100.memory_limit(64), profiles.hardware("a100-80g").memory_limit(64))
    assert "pp crosses 2 islands of 32 devices: h100, a100-80g" in mixed.notes


def test_outer_steps_between_sites_have_the_time_of_their_links() -> None:
    sites = ["sites.count=3", "sites.address=10.0.0.5:7100", "sites.every=50"]
    job = run_of(*sites)
    near, apart = Plan(job, H100, STACK), Plan(job, with_islands(devices=64), STACK)
    sent = 2 * 4 * parameter_count(job.model) / (FAR.bandwidth * SHARE) + FAR.latency
    assert outer_seconds(apart.hardware, job) == pytest.approx(sent)
    assert f"they take {sent:.3g} s every 50 steps, of which each waits for {sent / 50:.3g} s" in "".join(apart.notes)
    hidden = Plan(run_of(*sites, "sites.overlap=40"), apart.hardware, STACK)
    assert "each waits for 0 s, 0.0%" in "".join(hidden.notes)
    assert outer_seconds(TWO, job) is None, "a site is larger than an island"
    assert "no [islands] of h100 as large as a site" in "".join(near.notes)
    assert "outer" not in "".join(Plan(run_of(), H100, STACK).notes)


def test_the_search_gives_slow_islands_fewer_layers() -> None:
    fixed = ["parallel.tp", "parallel.pp", "parallel.cp", "parallel.zero", "batch.micro", "parallel.vpp"]
    fixed += ["parallel.schedule", "train.recompute", "parallel.sp"]
    config = run_of("parallel.schedule=1f1b", "parallel.sp=true", "train.recompute=none")
    first, *others = search(config, 64, MIXED, STACK, fixed).best
    assert first.layout.far_axis == "pp" and {plan.layout.far_axis for plan in others} == {"dp"}
    sizes = first.config.parallel.layers_per_chunk
    assert sizes is not None and sum(sizes) == 32 and min(sizes[:2]) > max(sizes[2:])
    even = Plan(config, MIXED, STACK)
    assert even.estimate.step_s > 1.3 * first.estimate.step_s


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "devices = 32\nbandwidth = 25e9\nlatency = 1e-3\nhardware = ['h10']",
            "mine.toml  islands.hardware: there is no profile 'h10'",
        ),
        ("bandwidth = 25e9\nlatency = 1e-3", "islands.devices"),
    ],
)
def test_mistakes_of_a_profile_are_told_at_once(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f'extends = "{profiles.path_of("hardware", "h100").absolute()}"\n[islands]\n{text}\n')
    with pytest.raises(ConfigError, match=said):
        profiles.hardware(str(path))

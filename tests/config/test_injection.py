"""The grammar of `fault.inject`: what it says, and that no slip of a key injects a fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from megascale.config.injection import (
    KINDS,
    Fault,
    Injection,
    InjectionError,
    RandomFaults,
    faults_of_ranks,
    parse_injection,
)
from megascale.config.loading import load_config_tree
from megascale.config.time_rules import launch_findings
from megascale.core.errors import ConfigError
from tests.runs import GPT, settings


def test_faults_by_rank_and_step() -> None:
    parsed = parse_injection("kill rank=2 step=5;  stop rank=1 step=9 phase=grad_reduce for_s=2.5;")
    assert parsed.faults == (
        Fault("kill", 5, rank=2, phase="forward"),
        Fault("stop", 9, rank=1, phase="grad_reduce", for_s=2.5),
    )
    assert parse_injection("hang rank=0 phase=load").faults == (Fault("hang", 0, rank=0, phase="load"),)
    assert parse_injection("cut_link node=1 peer=2 step=3").faults == (Fault("cut_link", 3, node=1, peer=2),)
    assert parse_injection("kill_driver step=4").faults[0].target == "driver"
    assert not parse_injection("") and not parse_injection(" ; ") and bool(parsed)


def test_random_faults() -> None:
    expected = Injection(random=RandomFaults(("kill", "stop"), mtbf_s=30.0, seed=7))
    assert parse_injection("random mtbf_s=30 seed=7 kinds=kill,stop") == expected
    apart = parse_injection("random mtbf_steps=30 apart=20 kinds=kill").random
    assert apart == RandomFaults(("kill",), mtbf_steps=30.0, apart=20.0)


def test_every_kind_has_an_example() -> None:
    for name, kind in KINDS.items():
        target = {"rank": "rank=0", "node": "node=0", "driver": ""}[kind.target]
        fault = parse_injection(f"{name} {target} step=1 {' '.join(f'{key}=1' for key in kind.required)}").faults[0]
        assert fault.kind == name and fault.target == kind.target
        assert fault.phase == kind.phase


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kil rank=1 step=2", "no fault 'kil'; did you mean kill?"),
        ("kill", "kill needs rank="),
        ("kill rank=1", "kill needs step="),
        ("kill step=1", "kill needs rank="),
        ("kill rank=1 step=0", "should be a step from 1 on"),
        ("kill rank=1 step=2 now", "'now' is not key=value"),
        ("kill rank=1 step=2 step=3", "step is given twice"),
        ("kill rank=1 stp=2", "no key 'stp'; did you mean step?"),
        ("kill rank=-1 step=2", "should be a whole number from 0 on"),
        ("kill rank=1 step=2 node=1", "kill has no node, only phase, rank, step, times"),
        ("kill node=1 step=2", "kill has no node"),
        ("kill rank=1 step=2 phase=lunch", "phase=lunch: should be one of build, "),
        ("lose_message rank=1 step=2 phase=forward", "lose_message has no phase"),
        ("full_disk rank=1 step=2 phase=forward", "should be one of write"),
        ("hang rank=1 step=2 phase=load", "load comes before the first step"),
        ("slow rank=1 step=2", "slow needs delay_s="),
        ("stop rank=1 step=2 for_s=nan", "should be a number from 0.001"),
        ("random kinds=kill", "random needs mtbf_s= or mtbf_steps="),
        ("random kinds=kill mtbf_s=1 mtbf_steps=1", "random needs mtbf_s= or mtbf_steps="),
        ("random mtbf_s=5", "random needs kinds="),
        ("random mtbf_s=5 kinds=kill,lose_node", "kinds=lose_node: should be of kill, stop"),
        ("random mtbf_s=5 kinds=kill rank=2", "random has no rank"),
        ("random mtbf_s=5 kinds=kill apart=5", "apart should be less than the mean"),
        ("flip_weight rank=1 step=2 bit=64", "bit=64: should be a bit from 0 to 63"),
        ("throttle_link node=1 step=2", "throttle_link needs mbit="),
        ("random mtbf_s=5 kinds=kill; random mtbf_s=5 kinds=stop", "`random` is given twice"),
    ],
)
def test_slips_are_refused(text: str, message: str) -> None:
    with pytest.raises(InjectionError) as error:
        parse_injection(text)
    assert message in str(error.value)


def test_a_configuration_says_what_is_wrong_with_its_faults() -> None:
    tree = settings(GPT, Path("runs"))
    assert load_config_tree(tree, "test").fault.inject == ""
    with pytest.raises(ConfigError, match=r"fault.inject: .*no fault 'kil'; did you mean kill\?"):
        load_config_tree(tree, "test", ["fault.inject=kil rank=1 step=2"])
    with pytest.raises(ConfigError, match=r"fault.inject: there is no rank 2 for kill  -> a rank from 0 to 1"):
        load_config_tree(tree, "test", ["fault.inject=kill rank=2 step=2"], 2)


@pytest.mark.parametrize("dp", ["2", "auto"])
@pytest.mark.parametrize(("fault", "found"), [("kill rank=1 step=2", ""), ("kill rank=2 step=2", "no rank 2 for kill")])
def test_ranks_that_do_not_exist_are_refused_once_their_number_is_known(dp: str, fault: str, found: str) -> None:
    tree = settings(GPT, Path("runs"), parallel__tp=1, train__steps=4)
    overrides = [f"parallel.dp={dp}", f"fault.inject=hang rank=0 phase=load; {fault}"]
    if not found:
        assert load_config_tree(tree, "test", overrides, 2).world_size == 2
        return
    with pytest.raises(ConfigError, match=found) as refused:
        load_config_tree(tree, "test", overrides, 2)
    assert len(refused.value.problems) == 1
    if dp == "auto":  # any number of processes may follow; a launcher starts one
        config = load_config_tree(tree, "test", overrides)
        sections = config.fault, config.launch, config.comm, config.checkpoint, config.nccl
        found_later = launch_findings(config.world_size, *sections)
        assert [one.message for one in found_later] == ["there is no rank 2 for kill"]
    else:
        with pytest.raises(ConfigError, match=found):
            load_config_tree(tree, "test", overrides)


@pytest.mark.parametrize("kind", [name for name, card in KINDS.items() if card.target != "rank"])
def test_faults_that_a_run_does_not_inject_are_refused(kind: str) -> None:
    target = "" if KINDS[kind].target == "driver" else "node=0"
    fault = f"{kind} {target} step=1 {' '.join(f'{key}=1' for key in KINDS[kind].required)}"
    with pytest.raises(ConfigError, match=f"{kind} is a fault of the {KINDS[kind].target}") as refused:
        load_config_tree(settings(GPT, Path("runs")), "test", [f"fault.inject=kill rank=0 step=1; {fault}"])
    assert len(refused.value.problems) == 1


def test_steps_that_the_run_does_not_have_are_refused() -> None:
    tree = settings(GPT, Path("runs"), train__steps=4)
    assert load_config_tree(tree, "test", ["fault.inject=kill rank=0 step=4"]).train.steps == 4
    with pytest.raises(ConfigError, match="there is no step 5 for kill  -> a step from 1 to 4"):
        load_config_tree(tree, "test", ["fault.inject=kill rank=0 step=5"])


def test_faults_of_ranks_alone() -> None:
    text = "kill rank=1 step=2 ; lose_node node=0 step=3; kill_driver step=3; random mtbf_s=5 kinds=kill; "
    text += "stop rank=4 step=5"
    assert faults_of_ranks(text) == "kill rank=1 step=2; random mtbf_s=5 kinds=kill; stop rank=4 step=5"
    assert faults_of_ranks(text, 4) == "kill rank=1 step=2; random mtbf_s=5 kinds=kill"
    assert faults_of_ranks("") == faults_of_ranks("kill_driver step=3") == ""

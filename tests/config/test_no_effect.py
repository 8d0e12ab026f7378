"""Settings without effect: keys of another mode are mistakes; keys that wait for a switch are warnings, and so are long
runs without checkpoints and very many epochs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megascale.catalog.decays import DECAYS
from megascale.catalog.schedules import SCHEDULES
from megascale.config.exclusions import SWITCHED_OFF
from megascale.config.loading import load_config
from megascale.config.model_rules import new_router
from megascale.config.run_warnings import run_warnings
from megascale.config.train import CheckpointConfig
from megascale.core.errors import ConfigError
from tests.config.test_mistakes import GOOD
from tests.data.datasets import write_dataset


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(GOOD)


@pytest.mark.parametrize(("mode", "key"), [
    *((f"optimizer.decay={name}", "optimizer.decay_steps=3") for name in DECAYS.names() if name != "wsd"),
    ("optimizer.decay=constant", "optimizer.min_lr=1e-3"),
    ("train.weight_average=none", "train.weight_average_every=2"),
    ("train.weight_average=lawa", "train.weight_average_decay=0.9"),
    ("train.weight_average=ema", "train.weight_average_count=3"),
    ("fp8.recipe=rowwise", "fp8.history=4"),
    ("fp8.recipe=blockwise", "fp8.fast_dgrad=true"),
    ("data.reader=rank", "data.reader_timeout_s=9"),
    ("model.position=learned", "model.rope_theta=5e5"),
    ("parallel.pp=1", "nccl.pp_carveout=4"),
])  # fmt: skip
def test_a_key_of_another_mode(mode: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("run.toml", [mode, key])
    (found,) = caught.value.problems
    assert found.key == key.partition("=")[0] and "has no effect with" in found.message and found.hint
    load_config("run.toml", [mode])


def test_a_resolved_configuration_has_no_key_without_effect() -> None:
    """What a run stores can be trained again, whatever its decay."""
    for name in DECAYS.names():
        config = load_config("run.toml", [f"optimizer.decay={name}"])
        assert (config.optimizer.decay_steps is None) == (name != "wsd")


def test_a_preset_of_rope_with_learned_positions() -> None:
    """The preset's keys of rope are not the user's."""
    config = load_config("run.toml", ['model={preset="llama3-1b", position="learned"}'])
    assert config.model.rope_theta == 10_000 and config.model.rope_scaling is None


def warnings(*overrides: str, world: int | None = None) -> list[str]:
    return list(run_warnings(load_config("run.toml", overrides, world)))


def test_every_switch_warns_of_keys_that_wait_for_it() -> None:
    assert warnings() == []
    assert {exclusion.key for exclusion in SWITCHED_OFF} >= {"train.eval_every", "checkpoint.every"}
    assert warnings("train.eval_steps=3") == ["train.eval_steps has no effect with eval_every = 0  -> remove the key"]
    assert warnings("train.eval_steps=3", "train.eval_every=5") == []
    assert warnings("fp8={first_layers_bf16=0, monitor=false}") == [], "which ask for no FP8"


def test_a_router_of_given_weights_may_stay_as_it_is() -> None:
    """A published model with one normalized expert a token is trained with a warning; a new one is refused."""
    model = "model={preset='mixtral-8x7b', experts_per_token=1, router_normalize=false}"
    config = load_config("run.toml", [model, "moe.balance=sequence"])
    normalized = config.model.model_copy(update={"router_normalize": True})
    assert [len(list(new_router(normalized, CheckpointConfig(resume=of)))) for of in ("auto", "hf:folder")] == [1, 0]
    (warning,) = run_warnings(config.model_copy(update={"model": normalized}))
    assert warning.startswith("model.router_normalize makes the weight of a token's only expert 1")


@pytest.mark.parametrize(("key", "switch"), [
    ("fp8.recipe=rowwise", "train.precision=fp8"),
    ("fp8.scale=pow2", "train.precision=fp8"),
    ("fp8.schedule=[[0.5, 'bf16']]", "train.precision=fp8"),
    ("parallel.sp=true", "parallel.tp=2"),
    ("parallel.cp_mode=ulysses", "parallel.cp=2"),
    ("parallel.schedule=interleaved_1f1b", "parallel={pp=2, vpp=2, schedule='interleaved_1f1b'}"),
    ("overlap.cp=false", "parallel.cp=2"),
    ("parallel.zero=3", "parallel.dp=2"),
    ("parallel.zero=2", "parallel.cp=2"),
    ("data.prefetch=3", "data={mock=true, reader='host', prefetch=3}"),
])  # fmt: skip
def test_a_key_that_waits_for_its_switch(key: str, switch: str) -> None:
    (line,) = warnings(key)
    effect = "shards nothing" if key.startswith("parallel.zero") else "has no effect"
    assert line.startswith(f"{key.partition('=')[0]} {effect} with") and "  -> " in line
    assert warnings(key, switch) == []


def test_a_recipe_after_the_last_step() -> None:
    fp8 = "train.precision=fp8"
    assert warnings(fp8, "fp8.schedule=[[0.9, 'bf16']]") == [], "the last of ten steps"
    (line,) = warnings(fp8, "fp8.schedule=[[0.5, 'rowwise'], [0.91, 'bf16']]")
    assert line.startswith("fp8.schedule bf16 at 0.91 has no effect: the last of 10 steps begins at 0.9 ")


@pytest.mark.parametrize("keys", [["fp8.recipe=static"], ["fp8.schedule=[[0.5, 'static'], [0.7, 'bf16']]"]])
def test_static_scales_without_unit_scaling(keys: list[str]) -> None:
    """Of a later recipe as well; without FP8 no scale is."""
    config = load_config("run.toml", ["train.precision=fp8", *keys])
    (line,) = run_warnings(config)
    assert line.startswith("fp8.recipe = static: ") and "  -> model.unit_scaling = true" in line
    scaled = config.model.model_copy(update={"unit_scaling": True})
    assert list(run_warnings(config.model_copy(update={"model": scaled}))) == []


EXPERTS = ["model.experts=8", "model.bias=false", "batch.global=16", "moe.balance=sequence"]


def test_experts_without_a_balance() -> None:
    assert warnings(*EXPERTS) == warnings(*EXPERTS[:3], "model.balance_bias=true") == []
    (line,) = warnings(*EXPERTS[:3])
    assert line.startswith("moe.balance = none") and "  -> " in line


@pytest.mark.parametrize("key", ["moe.dispatcher=all_gather", "moe.token_blocks=2"])
def test_an_exchange_without_ranks(key: str) -> None:
    (line,) = warnings(*EXPERTS, key)
    assert line.startswith(f"{key.partition('=')[0]} has no effect with ep = 1")
    assert warnings(*EXPERTS, key, "parallel.ep=2") == []


@pytest.mark.parametrize(("factor", "warned"), [(0.5, "= 0.5 drops 50%"), (1.0, ""), (3.9, ""), (4.0, "has no effect")])
def test_a_capacity_that_is_none(factor: float, warned: str) -> None:
    """An expert of 8, of which a token has 2, has at most four times the mean load."""
    found = warnings(*EXPERTS, f"moe.capacity_factor={factor}")
    assert len(found) == bool(warned) and all(line.startswith(f"moe.capacity_factor {warned}") for line in found)


@pytest.mark.parametrize("name", [name for name in SCHEDULES.names() if SCHEDULES[name].facts["v"] != 2])
def test_a_schedule_of_one_stage(name: str) -> None:
    found = warnings(f"parallel.schedule={name}")
    assert len(found) == (name != "1f1b") and all(line.startswith("parallel.schedule ") for line in found)


def test_a_ring_of_hybrid_data_parallelism_overlaps() -> None:
    keys = ["parallel.hybrid_dp=true", "data.attention_mask=document", "data.max_tokens_per_rank=16"]
    assert warnings(*keys, "overlap.cp=false") == []
    (line,) = warnings("overlap.cp=false", "parallel={cp=2, cp_mode='ulysses'}")
    assert "(cp = 2, cp_mode = ulysses)" in line


@pytest.fixture
def dataset() -> str:
    write_dataset(Path("corpus"), [50] * 40)
    Path("run.toml").write_text(GOOD.replace("vocab_size = 101", "vocab_size = 5000"))
    return "data={train='corpus', split=[1.0, 0.0], cache='cache'}"


@pytest.mark.parametrize(
    ("steps", "world", "warned"), [(10, 1, False), (1000, 1, True), (10, 8, False), (10, 16, True)]
)
def test_a_long_or_large_run_without_checkpoints(dataset: str, steps: int, world: int, warned: bool) -> None:
    words = [dataset, "checkpoint.every=0", f"train.steps={steps}", "batch.global=16"]
    found = [line for line in warnings(*words, world=world) if line.startswith("checkpoint.every ")]
    assert len(found) == warned
    assert not warnings(*words[1:], "data={mock=true}", world=world), "nothing is worth a checkpoint"
    assert list(run_warnings(load_config("run.toml", words[1:], world), restarts=True)), "of a driver"
    assert not [line for line in warnings(*words, "checkpoint.every=5", world=world) if "checkpoint" in line]


@pytest.mark.parametrize(("steps", "warned"), [(100, False), (5000, True)])
def test_many_epochs(dataset: str, steps: int, warned: bool) -> None:
    found = [line for line in warnings(dataset, f"train.steps={steps}") if line.startswith("train.steps ")]
    assert [("times" in line, "an epoch has 15" in line) for line in found] == [(True, True)] * warned

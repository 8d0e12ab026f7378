"""Grown checkpoints: the function stays, moments follow the gradients, and training goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megascale.catalog.layers import ACTIVATIONS, ATTENTIONS, BLOCKS, NORMS
from megascale.checkpoint import folders, offline
from megascale.checkpoint.format import manifest
from megascale.cli.main import main
from megascale.config.model import ModelConfig
from megascale.convert.growth import plan_growth
from megascale.convert.saved_weights import SavedWeights
from megascale.convert.tensor_map import model_tensors
from megascale.core.errors import ConfigError
from megascale.core.rank import Rank
from megascale.core.registry import Card, Registry
from megascale.core.storage import Location
from megascale.train.resume import load_initial_state
from megascale.train.step import train_step
from tests.oracles.ours import Result, compute
from tests.runs import GEMMA2, GPT, LLAMA, MLA, NEOX, OLMO2, build_run, config_of, curve_of, settings, write_config
from tests.worlds import run_world

WIDER = {"hidden_size": 64, "head_dim": 8}
LARGER = WIDER | {"num_layers": 8, "num_heads": 8, "num_kv_heads": 4, "ffn_size": 96}
MIXTURE = LLAMA | {
    "experts": 4, "experts_per_token": 2, "expert_ffn_size": 24, "dense_layers": 1, "shared_ffn_size": 16,
    "shared_gate": True, "router_bias": True, "balance_bias": True,
}  # fmt: skip
SPARSE = {"local_blocks": 1, "stride": 2, "block": 2}

GROWTHS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpt": (GPT, WIDER | {"num_layers": 8, "num_heads": 8, "num_kv_heads": 8, "ffn_size": 256}),
    "gpt, three times as wide": (GPT | {"tie_embeddings": False}, {"hidden_size": 96, "head_dim": 8, "num_layers": 5}),
    "gpt, parallel": (GPT | {"block": "parallel"}, WIDER | {"num_layers": 6, "num_heads": 6, "num_kv_heads": 6}),
    "llama": (LLAMA, LARGER),
    "llama, larger groups": (LLAMA, {"num_heads": 6, "head_dim": 8, "ffn_size": 50}),
    "llama, sinks and norms of heads": (LLAMA | {"attention_sinks": True, "qk_norm": "head"}, LARGER),
    "llama, all heads normed": (LLAMA | {"qk_norm": "full"}, WIDER | {"num_layers": 6, "ffn_size": 64}),
    "llama, windows": (LLAMA | {"window": [5, 0]}, {"num_layers": 8}),
    "llama, sparse": (LLAMA | {"sparse_attention": SPARSE}, WIDER | {"num_layers": 8}),
    "llama, linear attention": (LLAMA | {"attention_pattern": "LS"}, WIDER | {"ffn_size": 96}),
    "gemma2": (GEMMA2, LARGER),
    "olmo2": (OLMO2, LARGER),
    "fog": (OLMO2 | {"block": "fog", "qk_norm": "tanh"}, LARGER),
    "neox": (NEOX, WIDER | {"num_layers": 8, "num_heads": 8, "num_kv_heads": 8, "ffn_size": 200}),
    "mla": (MLA, WIDER | {"num_layers": 8, "ffn_size": 96}),
    "experts": (MIXTURE, LARGER | {"num_layers": 6, "expert_ffn_size": 32, "shared_ffn_size": 20, "dense_layers": 1}),
}
FURTHER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "exits": (LLAMA | {"exits": [2]}, WIDER | {"num_layers": 8, "exits": [3]}),
    "depths": (LLAMA | {"mtp_layers": 1}, {"num_layers": 6, "ffn_size": 64}),
}
QUICK = ("gpt", "llama")
TP2_PP2 = {"parallel__tp": 2, "parallel__pp": 2}


def train_and_save(rank: Rank, config: Any, steps: int) -> list[tuple[float, float]]:
    run = build_run(rank, config)
    load_initial_state(run, lambda folder: pytest.fail(str(folder)))
    curve = curve_of(run, steps)
    run.checkpoints.save(run.progress)
    return curve


def trained(model: dict[str, Any], folder: Path, **keys: Any) -> Path:
    """Train a model for three steps in two layouts' worth of state, and return its folder."""
    keys = {"checkpoint__every": 100, "optimizer__lr": 1e-2} | keys
    config = config_of(settings(model, folder, **keys), folder)
    run_world(1, train_and_save, config, 3)
    return config.folder


def grown(source: Path, model: dict[str, Any], folder: Path, **keys: Any) -> Path:
    """Grow by the command line."""
    config = write_config(settings(model, folder, **keys), folder / "to.toml")
    assert main(["ckpt", "grow", str(source), str(config), str(folder / "grown")]) == 0
    return folder / "grown"


def weights_of(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    source = folders.find_checkpoint(Location(str(path)))
    saved = manifest.read(source)
    section = {key: value for key, value in saved.facts.config["model"].items() if value is not None}
    weights, model = SavedWeights(source, saved), ModelConfig.model_validate(section)
    return section, {tensor.name: weights.read(tensor.name).double().numpy() for tensor in model_tensors(model)}


def forward(path: Path, folder: Path) -> Result:
    section, weights = weights_of(path)
    return compute(section, weights, folder, "fp64")


def copies(gradient: Any, shape: tuple[int, ...]) -> Any:
    """Sum what copies of the elements of a tensor of `shape` have: rows of the same number modulo."""
    for dim, size in enumerate(shape):
        if gradient.shape[dim] != size:
            gradient = sum(gradient.take(range(at, at + size), dim) for at in range(0, gradient.shape[dim], size))
    return gradient


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in GROWTHS])
def test_the_function_stays(name: str, tmp_path: Path) -> None:
    """Logits in fp64; gradients of the norms before the head and of embeddings, summed over copies, as well."""
    model, changes = GROWTHS[name]
    source = trained(model, tmp_path / "small")
    before = forward(source, tmp_path / "before")
    after = forward(grown(source, model | changes, tmp_path), tmp_path / "after")
    assert before.logits is not None and after.logits is not None
    assert after.loss == pytest.approx(before.loss, rel=1e-12)
    assert abs(after.logits - before.logits).max() < 1e-12 * abs(before.logits).max()
    embedding = "embedding.token.weight"
    small, large = before.gradients[embedding], after.gradients[embedding]
    assert abs(copies(large, small.shape) - small).max() < 1e-10 * abs(small).max()


def test_a_rule_that_is_left_out_shows(tmp_path: Path) -> None:
    """The final norm before a tied head counts: without its division the logits are others."""
    growth = plan_growth(model_of(GPT), model_of(GPT | WIDER), 0, "here")
    gain = torch.ones(32)
    assert growth.weight("final_norm.weight", gain).tolist() == [0.5] * 64
    untied = plan_growth(model_of(NEOX), model_of(NEOX | WIDER), 0, "here")
    assert untied.weight("final_norm.weight", gain).tolist() == [1.0] * 64


def model_of(keys: dict[str, Any]) -> ModelConfig:
    return ModelConfig.model_validate(keys)


def test_moments_follow_the_gradients(tmp_path: Path) -> None:
    """Copies that write the residual stream have half of each first moment and a quarter of each second one; new rows,
    columns and layers have none. The step and the samples go on.
    """
    source = trained(LLAMA, tmp_path / "small")
    path = folders.find_checkpoint(Location(str(source)))
    target = Location(str(grown(source, LLAMA | LARGER, tmp_path)))
    small, large = manifest.read(path), manifest.read(target)
    assert large.facts.progress == small.facts.progress
    assert {name.partition(".")[0] for name in large.tensors} == {"weights", "exp_avg", "exp_avg_sq"}
    for kind, factor in (("exp_avg", 0.5), ("exp_avg_sq", 0.25)):
        for name, moved in (
            ("attention.out.weight", factor),
            ("mlp.up.weight", 1.0),
            ("attention_norm.weight", factor),
        ):
            old = offline.read_tensor(path, small, f"{kind}.layers.1.{name}")
            new = offline.read_tensor(target, large, f"{kind}.layers.2.{name}")
            rows, columns = old.shape[0], (*old.shape, 1)[1]
            assert torch.equal(new.view(len(new), -1)[:rows, :columns], moved * old.view(rows, -1))
            assert not offline.read_tensor(target, large, f"{kind}.layers.3.{name}").any()
        new_rows = offline.read_tensor(target, large, f"{kind}.layers.2.mlp.up.weight")[48:]
        new_columns = offline.read_tensor(target, large, f"{kind}.layers.2.mlp.down.weight")[:, 48:]
        assert not new_rows.any() and not new_columns.any()


@pytest.mark.parametrize(
    "layout", [pytest.param({}, id="alone", marks=pytest.mark.slow), pytest.param(TP2_PP2, id="tp2 pp2")]
)
def test_training_goes_on_without_a_jump(layout: dict[str, Any], tmp_path: Path) -> None:
    """The first loss is that of the small model's next step, and none of the next ones is above it by a tenth."""
    source = trained(LLAMA, tmp_path / "small", train__steps=100)
    keys = {"checkpoint__every": 100, "checkpoint__resume": str(source), "optimizer__lr": 1e-2, "train__steps": 100}
    alone = config_of(settings(LLAMA, tmp_path / "on", **keys), tmp_path)
    expected = run_world(1, train_and_save, alone, 8)[0]
    keys["checkpoint__resume"] = str(grown(source, LLAMA | LARGER, tmp_path, train__steps=100))
    large = config_of(settings(LLAMA | LARGER, tmp_path / "large", **keys, **layout), tmp_path)
    curve = run_world(large.world_size, train_and_save, large, 8)[0]
    assert curve[0][0] == pytest.approx(expected[0][0], rel=1e-10)
    assert max(loss for loss, _ in curve) < 1.1 * expected[0][0]


def test_frozen_layers_have_other_numbers(tmp_path: Path) -> None:
    """State of a layer that was frozen begins at zero; new layers have the kinds of state of trained ones."""
    freeze = ["layers.3.*", "layers.*.mlp.*"]
    source = trained(LLAMA, tmp_path / "small", train__freeze=freeze)
    path = grown(source, LLAMA | LARGER, tmp_path)
    saved = manifest.read(Location(str(path)))
    frozen = saved.facts.config["train"]["freeze"]
    moved = "layers.6.attention.out.weight"
    assert moved in frozen and "layers.7.mlp.up.weight" in frozen and "layers.3.attention.out.weight" not in frozen
    assert f"exp_avg.{moved}" not in saved.tensors and "exp_avg.layers.7.attention.out.weight" in saved.tensors
    keys = {"checkpoint__every": 100, "checkpoint__resume": str(path), "train__freeze": ["layers.0.*"]}
    run_world(1, train_and_save, config_of(settings(LLAMA | LARGER, tmp_path / "on", **keys), tmp_path), 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", FURTHER)
def test_losses_of_exits_and_depths_stay(name: str, tmp_path: Path) -> None:
    model, changes = FURTHER[name]
    source, keys = trained(model, tmp_path / "small"), {"checkpoint__every": 100}
    losses = []
    for folder, keyed, path in (
        ("on", model, source),
        ("to", model | changes, grown(source, model | changes, tmp_path)),
    ):
        tree = settings(keyed, tmp_path / folder, checkpoint__resume=str(path), optimizer__lr=1e-2, **keys)
        losses.append(run_world(1, further_losses, config_of(tree, tmp_path))[0])
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)


def further_losses(rank: Rank, config: Any) -> list[float]:
    """The losses of the next step, of the next token and of the exits or depths, in the order of the network."""
    run = build_run(rank, config)
    load_initial_state(run, lambda folder: pytest.fail(str(folder)))
    totals = train_step(run, run.train_loader.batch(run.progress.samples)).totals
    return [value for name, value in totals.items() if name.startswith("loss")]


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (LLAMA, {}, "no size is larger"),
    (LLAMA, {"hidden_size": 48, "head_dim": 8}, "48 is no multiple of 32"),
    (LLAMA, {"hidden_size": 64}, "model.head_dim: 16 here, 8 in the checkpoint"),
    (LLAMA, {"num_layers": 2}, "2 is less than the checkpoint's 4"),
    (LLAMA, {"num_layers": 8, "norm_eps": 1e-6}, "model.norm_eps"),
    (LLAMA, {"num_heads": 8, "head_dim": 8, "num_kv_heads": 8}, "2 heads share a key-value head, and 1 would"),
    (LLAMA | {"qk_norm": "full"}, {"num_heads": 8, "head_dim": 8}, "the norm's mean is over all heads"),
    (LLAMA | {"mtp_layers": 1}, WIDER, "their merge reads two vectors"),
    (MLA, {"num_heads": 8, "head_dim": 8}, "heads of latent attention do not grow"),
    (LLAMA | {"sparse_attention": SPARSE}, {"num_heads": 8, "head_dim": 8}, "the blocks that a head sees"),
    (LLAMA | {"attention_pattern": "LS"}, {"num_heads": 8, "head_dim": 8}, "follow the number of heads"),
    (LLAMA | {"attention_pattern": "LS"}, {"num_layers": 8}, "follow the number of layers"),
    (LLAMA | {"window": [5, 0, 0]}, {"num_layers": 5, "window": [0, 5]}, "the windows, experts or exits"),
    (OLMO2 | {"unit_scaling": True}, {"num_layers": 8}, "its factors follow the sizes"),
    (OLMO2 | {"residual_tau": 0.2}, {"num_layers": 8}, "a layer that adds nothing scales"),
    (GPT, {"num_layers": 8, "seq_length": 32}, "model.positions"),
    (LLAMA, {"num_layers": 8, "sparse_attention": {"local_blocks": 1, "stride": 2}}, "leave out sparse_attention"),
    (LLAMA | {"sparse_attention": SPARSE}, {"sparse_attention": None}, "sparse_attention = {local_blocks = 1, stride"),
]


@pytest.mark.parametrize(("model", "changes", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
def test_what_changes_the_function_is_refused(model: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        plan_growth(model_of(model), model_of(model | changes), 0, "to.toml")
    assert message in str(error.value) and "the function would change" in str(error.value)


PLUG_INS = [
    ("block", BLOCKS, "serial", "plugged"),
    ("norm", NORMS, "rmsnorm", "plugged"),
    ("activation", ACTIVATIONS, "swiglu", "plugged"),
    ("attention_pattern", ATTENTIONS, "softmax", "SP"),
]


@pytest.mark.parametrize(("key", "registry", "like", "value"), PLUG_INS, ids=[key for key, *_ in PLUG_INS])
def test_plug_ins_are_refused(
    key: str, registry: Registry, like: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as the block of docs/extending/block.md: its norms after the sum, if 0, would leave nothing of it."""
    card = Card("plugged", "another package's", "package:Layer", {**registry[like].facts, "letter": "P"})
    monkeypatch.setitem(registry.cards, card.name, card)
    model = LLAMA | {key: value}
    with pytest.raises(ConfigError, match="there is no rule by which plugged, a plug-in, grows") as error:
        plan_growth(model_of(model), model_of(model | {"num_layers": 8}), 0, "to.toml")
    assert [problem.key for problem in error.value.problems] == [f"model.{key}"]


def test_scales_begin_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An operand such as layers.0.mlp.down.weight has the name of a weight."""
    source = trained(LLAMA, tmp_path / "small", train__precision="fp8", fp8__recipe="delayed")
    large = manifest.read(Location(str(grown(source, LLAMA | {"num_layers": 8}, tmp_path))))
    assert "fp8_history begins anew: the largest values of" in capsys.readouterr().err
    assert {name.partition(".")[0] for name in large.tensors} == {"weights", "exp_avg", "exp_avg_sq"}


def test_state_without_a_rule_leaves_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = trained(LLAMA, tmp_path / "small", optimizer__name="shampoo")
    config = write_config(settings(LLAMA | LARGER, tmp_path), tmp_path / "to.toml")
    assert main(["ckpt", "grow", str(source), str(config), str(tmp_path / "grown")]) == 4
    assert "has no rule by which it grows" in capsys.readouterr().err
    assert not list(tmp_path.glob("*grown*"))

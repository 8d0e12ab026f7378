"""Checkpoints of torchtitan: every element of weights and moments comes over, a run goes on, and the way back."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from megascale.checkpoint import offline
from megascale.checkpoint.folders import find_checkpoint
from megascale.checkpoint.format import manifest
from megascale.checkpoint.format.state import Progress
from megascale.cli.main import main
from megascale.config.model import ModelConfig
from megascale.convert.dcp import DcpFolder
from megascale.convert.tensor_map import model_tensors
from megascale.core.rank import Rank
from megascale.core.storage import Location
from megascale.train.resume import load_initial_state
from tests.convert.test_dcp import Code
from tests.convert.torchtitan_on_cpu import LR, WARMUP_STEPS, WEIGHT_DECAY
from tests.runs import GPT, LLAMA, build_run, config_of, curve_of, settings, write_config
from tests.worlds import run_world

ROOT = Path(__file__).parents[2]
PEERS = Path(os.environ.get("MEGASCALE_PEERS", ROOT.parent / "shared" / "peers"))
sys.path.insert(0, str(ROOT / "tools" / "bench"))

from peer_install import python_of  # noqa: E402
from peer_run import output  # noqa: E402

PYTHON = python_of("torchtitan")
NAMES = {
    "embedding.token.weight": "tok_embeddings.weight", "final_norm.weight": "norm.weight", "head.w": "lm_head.w",
    ".attention.q.": ".attention.qkv_linear.wq.", ".attention.k.": ".attention.qkv_linear.wk.",
    ".attention.v.": ".attention.qkv_linear.wv.", ".attention.out.": ".attention.wo.", ".mlp_norm.": ".ffn_norm.",
    ".mlp.gate.": ".feed_forward.w1.", ".mlp.up.": ".feed_forward.w3.", ".mlp.down.": ".feed_forward.w2.",
}  # fmt: skip
STATE = ("weights", "exp_avg", "exp_avg_sq")
QWEN3 = LLAMA | {"qk_norm": "head", "head_dim": 12, "tie_embeddings": True}
GROUP = {"lr": 1e-3, "initial_lr": 4e-3, "betas": (0.9, 0.99), "eps": 1e-7, "fused": True}
RUN = {"train_state": {"step": 5, "ntokens_seen": 640}, "lr_scheduler": {"last_epoch": 5}}


def theirs(ours: str, older: bool = False) -> str:
    """The name of a weight in torchtitan 0.3, or 0.2 (`older`)."""
    for part, name in NAMES.items():
        ours = ours.replace(part, name)
    return ours.replace("lm_head", "output").replace("qkv_linear.", "") if older else ours


def neighbours(rows: Tensor, heads: int) -> Tensor:
    """Place the pairs to rotate, which are halves of a head, beside each other."""
    return rows.view(heads, 2, -1, rows.shape[-1]).transpose(1, 2).reshape(rows.shape)


def as_theirs(model: ModelConfig, tensors: dict[str, Tensor], older: bool = False) -> dict[str, Tensor]:
    """Weights, or a moment, in torchtitan's names and order of rows."""
    found = {theirs(name, older): tensor for name, tensor in tensors.items()}
    for name in found if model.qk_norm == "none" else ():
        for part, heads in (".wq.", model.num_heads), (".wk.", model.num_kv_heads):
            if part in name:
                found[name] = neighbours(found[name], heads)
    return found


def fuse(model: ModelConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stack q, k and v, group of heads by group."""
    fused = {name: tensor for name, tensor in tensors.items() if "qkv_linear" not in name}
    for layer in range(model.num_layers):
        start, size = f"layers.{layer}.attention.qkv_linear.", model.head_dim
        q, k, v = (tensors[f"{start}w{part}.weight"] for part in "qkv")
        many = model.num_heads // model.num_kv_heads * size
        fused[f"{start}wqkv.weight"] = torch.cat([
            rows for group in range(model.num_kv_heads)
            for rows in (q[group * many : (group + 1) * many], *(x[group * size : (group + 1) * size] for x in (k, v)))
        ])  # fmt: skip
    return fused


def state_of(model: ModelConfig) -> dict[str, dict[str, Tensor]]:
    """Random weights and moments, by kind of state."""
    generator = torch.Generator().manual_seed(0)
    return {
        kind: {tensor.name: torch.rand(tensor.shape, generator=generator) for tensor in model_tensors(model)}
        for kind in STATE
    }


def titan_state(model: ModelConfig, state: dict[str, dict[str, Tensor]], version: str) -> dict[str, Any]:
    """The state dict that torchtitan saves: of version 0.2, or of 0.3 with or without fused parameters."""
    older, fused = version == "0.2", version == "0.3"
    weights = as_theirs(model, state["weights"], older)
    if model.tie_embeddings:
        weights["output.weight" if older else "lm_head.weight"] = weights["tok_embeddings.weight"]
    optimizer: dict[str, Any] = {}
    for kind in STATE[1:]:
        moments = as_theirs(model, state[kind], older)
        for name, tensor in (fuse(model, moments) if fused else moments).items():
            optimizer |= {f"state.{name}.{kind}": tensor, f"state.{name}.step": torch.tensor(5.0)}
            group = GROUP | {"weight_decay": 0.0 if "norm" in name else 0.2}
            optimizer |= {f"param_groups.{name}.{key}": value for key, value in group.items()}
    return weights | {"optimizer": optimizer, **RUN}


def saved(folder: Path, state: dict[str, Any]) -> str:
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return f"torchtitan:{folder}"


def converted(source: str, output: Path, model: dict[str, Any], **keys: Any) -> int:
    """Convert a folder of torchtitan, for a run with a model."""
    path = write_config(settings(model, output.parent, **keys), output.parent / "run.toml")
    return main(["ckpt", "convert", source, str(output), "--config", str(path)])


@pytest.mark.parametrize("model", [LLAMA, QWEN3], ids=["llama", "qwen3"])
@pytest.mark.parametrize("version", ["0.2", "0.3", "0.3 not fused"])
def test_every_element_comes_over(version: str, model: dict[str, Any], tmp_path: Path) -> None:
    config = ModelConfig.model_validate(model)
    state = state_of(config)
    source = saved(tmp_path / "theirs", titan_state(config, state, version))
    assert converted(source, tmp_path / "ours", model, optimizer__name="muon") == 0
    folder = Location(str(tmp_path / "ours"))
    made = manifest.read(folder)
    assert made.tensors.keys() == {f"{kind}.{name}" for kind in STATE for name in state[kind]}
    for kind in STATE:
        for name, tensor in state[kind].items():
            assert offline.read_tensor(folder, made, f"{kind}.{name}").equal(tensor), (kind, name)
    assert vars(made.facts.progress) == {"step": 5, "samples": 40, "tokens": 640}
    given = {"name": "adamw", "lr": 4e-3, "betas": [0.9, 0.99], "eps": 1e-7, "weight_decay": 0.2}
    assert made.facts.config["optimizer"].items() >= given.items()


def test_weights_alone_are_a_checkpoint_at_step_0(tmp_path: Path) -> None:
    config = ModelConfig.model_validate(LLAMA)
    weights = as_theirs(config, state_of(config)["weights"])
    assert converted(saved(tmp_path / "theirs", weights), tmp_path / "ours", LLAMA) == 0
    made = manifest.read(Location(str(tmp_path / "ours")))
    assert made.facts.progress.step == 0
    assert {name.partition(".")[0] for name in made.tensors} == {"weights"}


def test_what_differs_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = ModelConfig.model_validate(LLAMA)
    state = titan_state(config, state_of(config), "0.3")
    state["optimizer"]["param_groups.norm.weight.weight_decay"] = 0.2
    state["dataloader"] = {"dp_rank_0": b"place", "world_size": 1}
    assert converted(saved(tmp_path / "theirs", state), tmp_path / "ours", LLAMA) == 0
    error = capsys.readouterr().err
    assert "1 parameters, such as norm.weight, have other settings than [optimizer] gives them" in error
    assert "the place in torchtitan's data is left out" in error


def trained(rank: Rank, config: Any, steps: int, save: bool = False) -> tuple[list[tuple[float, float]], str]:
    """Resume, train and save. Returns the curve and what the start says."""
    run = build_run(rank, config)
    text = load_initial_state(run, lambda folder: pytest.fail(str(folder)))
    curve = curve_of(run, steps)
    if save:
        run.checkpoints.save(run.progress)
    return curve, text


def test_a_run_goes_on_after_the_way_there_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = {"train__precision": "fp32", "checkpoint__every": 1}
    straight = config_of(settings(LLAMA, tmp_path, name="straight", **keys), tmp_path)
    ((first, _),) = run_world(1, trained, straight, 3, True)
    ((rest, _),) = run_world(1, trained, straight, 3)
    source = straight.folder / "checkpoints" / "step-00000003"
    assert main(["ckpt", "convert", str(source), f"torchtitan:{tmp_path / 'theirs'}"]) == 0
    assert "checkpoint.exclude_from_loading" in capsys.readouterr().err
    assert converted(f"torchtitan:{tmp_path / 'theirs'}", tmp_path / "ours", LLAMA, **keys) == 0
    assert main(["ckpt", "diff", str(source), str(tmp_path / "ours")]) == 0
    assert "0 differ" in capsys.readouterr().out
    again = config_of(settings(LLAMA, tmp_path, checkpoint__resume=str(tmp_path / "ours"), **keys), tmp_path)
    ((curve, text),) = run_world(1, trained, again, 3)
    assert curve == rest != first
    assert "resumed from" in text and "changed since" not in text


def test_torch_loads_what_is_exported_as_torchtitan_does(tmp_path: Path) -> None:
    """By the names of 0.3, with fused parameters; all that a group of AdamW has is there."""
    config = ModelConfig.model_validate(LLAMA)
    state = titan_state(config, state_of(config), "0.3")
    assert converted(saved(tmp_path / "theirs", state), tmp_path / "ours", LLAMA, optimizer__warmup_steps=8) == 0
    assert main(["ckpt", "convert", str(tmp_path / "ours"), f"torchtitan:{tmp_path / 'again'}"]) == 0
    named = torch.optim.AdamW([torch.zeros(1)], fused=True, foreach=False).param_groups[0].keys() - {"params"}
    found = DcpFolder(tmp_path / "again")
    for name in (key for key in state["optimizer"] if key.endswith(".eps")):
        assert named <= {key.rpartition(".")[2] for key in found.objects if key.startswith(f"optimizer.{name[:-3]}")}
    blank: dict[str, Any] = {key: torch.zeros_like(value) for key, value in state.items() if isinstance(value, Tensor)}
    blank |= {"optimizer": {key: torch.zeros_like(value) if isinstance(value, Tensor) else None
                            for key, value in state["optimizer"].items()},
              "train_state": {"step": 0, "ntokens_seen": 0}, "lr_scheduler": {"last_epoch": 0}}  # fmt: skip
    dcp.load(blank, checkpoint_id=tmp_path / "again", no_dist=True)
    flat, expected = ({**tree.pop("optimizer"), **tree} for tree in (blank, dict(state)))
    for key, value in expected.items():
        if key.endswith(".lr"):
            assert flat[key] == pytest.approx(4e-3 * 6 / 8)  # of the next step
        elif isinstance(value, Tensor):
            assert flat[key].equal(value), key
        else:
            assert flat[key] == value, key


def changed(**state: Any) -> dict[str, Any]:
    config = ModelConfig.model_validate(LLAMA)
    return titan_state(config, state_of(config), "0.3") | state


WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another size": (LLAMA | {"vocab_size": 102}, {}, "tok_embeddings.weight has shape [101, 32], [102, 32] by the"),
    "more layers": (LLAMA | {"num_layers": 5}, {}, "has no tensor layers.4.attention_norm.weight, [32] by the"),
    "fewer layers": (LLAMA | {"num_layers": 3}, {}, "has 23 tensors that are not of the configuration's model: layers"),
    "other heads": (LLAMA | {"num_kv_heads": 1}, {}, "attention.qkv_linear.wk.weight has shape [16, 32], [8, 32]"),
    "a tied head": (LLAMA | {"tie_embeddings": True}, {}, "not of the configuration's model: lm_head.weight"),
    "another family": (GPT, {}, "torchtitan's Llama 3 and Qwen 3 do not compute the model: gpt2"),
    "biases": (LLAMA | {"bias": True}, {}, "do not compute the model: llama, with layers.0.attention.q.bias"),
    "another step": (LLAMA, {"lr_scheduler": {"last_epoch": 4}}, "lr_scheduler.last_epoch is 4, train_state.step is 5"),
    "an object with code": (LLAMA, {"train_state": {"step": [Code()]}}, "train_state.step names posix.mkdir"),
}


@pytest.mark.parametrize("wrong", sorted(WRONG))
def test_what_cannot_be_converted_is_refused_in_a_line(
    wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, state, words = WRONG[wrong]
    assert converted(saved(tmp_path / "theirs", changed(**state)), tmp_path / "ours", model) == 4
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
    assert not list(tmp_path.glob("*ours*"))


def test_a_missing_shard_leaves_nothing_half_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = saved(tmp_path / "theirs", changed())
    (tmp_path / "theirs" / "__0_0.distcp").unlink()
    assert converted(source, tmp_path / "ours", LLAMA) == 4
    assert f"{tmp_path / 'theirs'} lacks the file __0_0.distcp" in capsys.readouterr().err
    assert not list(tmp_path.glob("*ours*"))


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        (["torchtitan:theirs", "ours"], 4, "torchtitan:theirs does not tell heads, rope and norms of its model"),
        (["torchtitan:theirs", "torchtitan:ours"], 2, "torchtitan:theirs is no checkpoint of megascale"),
        (["torchtitan:theirs", "ours", "--dtype", "bf16"], 2, "--dtype: no effect with torchtitan:FOLDER"),
        (["theirs", "ours", "--config", __file__], 2, "--config: no effect without SYSTEM:FOLDER"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    words: list[str], status: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ckpt", "convert", *words]) == status
    assert text in capsys.readouterr().err


def test_weights_without_moments_of_adamw_are_exported_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ModelConfig.model_validate(LLAMA)
    (tmp_path / "ours").mkdir()
    weights = state_of(config)["weights"]
    tensors = ((f"weights.{name}", tensor) for name, tensor in weights.items())
    offline.write_state(tmp_path / "ours", tensors, {"model": config.model_dump(mode="json", by_alias=True)})
    assert main(["ckpt", "convert", str(tmp_path / "ours"), f"torchtitan:{tmp_path / 'theirs'}"]) == 0
    assert "weights alone" in capsys.readouterr().err
    found, expected = DcpFolder(tmp_path / "theirs"), as_theirs(config, weights)
    assert found.tensors.keys() == expected.keys() and not found.objects
    assert all(found.read(name).equal(tensor) for name, tensor in expected.items())


def test_a_checkpoint_without_a_plan_is_exported_at_its_full_rate(tmp_path: Path) -> None:
    """As one of Megatron-LM's that was converted without --config."""
    model = ModelConfig.model_validate(LLAMA)
    (tmp_path / "ours").mkdir()
    tensors = {f"{kind}.{name}": each for kind, state in state_of(model).items() for name, each in state.items()}
    facts = {"model": model.model_dump(mode="json", by_alias=True), "optimizer": {"name": "adamw", "lr": 3e-3}}
    offline.write_state(tmp_path / "ours", iter(tensors.items()), facts, progress=Progress(5, 20, 320))
    assert main(["ckpt", "convert", str(tmp_path / "ours"), f"torchtitan:{tmp_path / 'theirs'}"]) == 0
    found = DcpFolder(tmp_path / "theirs")
    assert found.read_value("optimizer.param_groups.norm.weight.lr") == pytest.approx(3e-3)
    assert found.read_value("train_state.step") == 5


WIDTHS = {
    "hidden": 32,
    "layers": 4,
    "heads": 4,
    "ffn": 48,
    "vocab": 101,
    "seq": 16,
    "micro-batch": 1,
    "global-batch": 8,
}
"""The sizes of LLAMA, as torchtitan_cpu.py has them."""


def batches(rank: Rank, config: Any, steps: int) -> np.ndarray:
    """Inputs and labels [2, steps, batch, sequence] of a run."""
    run = build_run(rank, config)
    found = []
    for step in range(steps):
        batch = run.train_loader.batch(step * config.batch.total)
        micro = [batch.micro_batches[index] for index in range(config.batch.total)]
        found.append([torch.cat([each.tokens.t() for each in micro]), torch.cat([each.labels.t() for each in micro])])
    return np.array([[part.numpy() for part in step] for step in found]).swapaxes(0, 1)


def titan(folder: Path, steps: int, load: int = 0, save: int = 0, fused: bool = True, **layout: int) -> list[float]:
    """Train torchtitan on the batches in `folder` to a step. Returns the losses."""
    sizes = WIDTHS | layout | {"steps": steps}
    given = {
        "peers": str(PEERS), "arguments": [word for key, size in sizes.items() for word in (f"--{key}", str(size))],
        "tokens": str(folder / "tokens.npy"), "kv_heads": 2, "fused": fused, "folder": str(folder / "titan"),
        "load": load, "save": save, "losses": str(folder / "losses.json"),
    }  # fmt: skip
    (folder / "titan.json").write_text(json.dumps(given))
    world = layout.get("tp", 1) * layout.get("dp", 1)
    ranks = ["torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(world)]
    script, words = str(ROOT / "tests/convert/torchtitan_on_cpu.py"), str(folder / "titan.json")
    printed = output([str(PYTHON), "-m", *ranks, script, words], 300, str(folder))
    assert isinstance(printed, str), printed
    losses: list[float] = json.loads((folder / "losses.json").read_text())
    return losses


@pytest.mark.slow
@pytest.mark.skipif(PYTHON is None, reason="torchtitan is not installed: tools/bench/peers.py --install torchtitan")
@pytest.mark.skipif(not (PEERS / "torchtitan_cpu.py").is_file(), reason=f"torchtitan_cpu.py is not in {PEERS}")
@pytest.mark.parametrize(
    ("fused", "there", "here"),
    [(True, {"dp": 2}, {"parallel__tp": 2}), (False, {"tp": 2}, {"parallel__pp": 2})],
    ids=["dp 2, fused, to tp 2", "tp 2 to pp 2"],
)
def test_torchtitan_itself_goes_on_here_and_goes_on_again(
    fused: bool, there: dict[str, int], here: dict[str, int], tmp_path: Path
) -> None:
    """Five steps there, five here, five there again: the losses are those of fifteen steps there."""
    keys: dict[str, Any] = {
        "train__precision": "fp32", "train__steps": WARMUP_STEPS + 1, "optimizer__lr": LR, "checkpoint__every": 1,
        "optimizer__warmup_steps": WARMUP_STEPS, "optimizer__weight_decay": WEIGHT_DECAY,
    }  # fmt: skip
    (tokens,) = run_world(1, batches, config_of(settings(LLAMA, tmp_path, **keys), tmp_path), 15)
    np.save(tmp_path / "tokens.npy", tokens)
    straight = titan(tmp_path, 15, save=5, fused=fused, **there)

    source, ours = tmp_path / "titan" / "step-5", tmp_path / "ours"
    assert converted(f"torchtitan:{source}", ours, LLAMA, **keys) == 0
    assert_equal(source, Location(str(ours)), fused)
    resumed = settings(LLAMA, tmp_path, name="here", checkpoint__resume=str(ours), **keys, **here)
    (curve, text), _ = run_world(2, trained, config_of(resumed, tmp_path), 5, True)
    assert "changed since" not in text
    assert [loss for loss, _ in curve] == pytest.approx(straight[5:10], abs=1e-5)

    saved_here = find_checkpoint(Location(str(tmp_path / "here")))
    assert main(["ckpt", "convert", saved_here.url, f"torchtitan:{tmp_path / 'titan' / 'step-10'}"]) == 0
    assert_equal(tmp_path / "titan" / "step-10", saved_here, fused=True)
    again = titan(tmp_path, 15, load=10, **there)
    assert again == pytest.approx(straight[10:], abs=1e-5)


def assert_equal(source: Path, ours: Location, fused: bool) -> None:
    """Compare each element of a folder of torchtitan, as torch loads it, with a checkpoint."""
    model, made = ModelConfig.model_validate(LLAMA), manifest.read(ours)
    loaded = _load_state_dict_from_keys(checkpoint_id=source)
    for kind in STATE:
        names = [tensor.name for tensor in model_tensors(model)]
        tensors = as_theirs(model, {name: offline.read_tensor(ours, made, f"{kind}.{name}") for name in names})
        if kind != "weights":
            tensors = {f"state.{name}.{kind}": x for name, x in (fuse(model, tensors) if fused else tensors).items()}
        there = loaded if kind == "weights" else loaded["optimizer"]
        assert all(there[name].equal(tensor) for name, tensor in tensors.items()), kind

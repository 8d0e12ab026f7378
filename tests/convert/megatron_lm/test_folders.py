"""Folders of Megatron-LM: what is in one, and what is refused in one line with nothing half-written."""

from __future__ import annotations

import argparse
import enum
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megascale.checkpoint import offline
from megascale.checkpoint.format import manifest
from megascale.checkpoint.format.state import Progress
from megascale.cli.main import main
from megascale.config.model import ModelConfig
from megascale.convert.dcp import DcpFolder
from megascale.convert.megatron_lm.conversion import from_megatron, to_megatron
from megascale.convert.megatron_lm.iteration import MOMENTS, TRACKER, read_common
from megascale.convert.megatron_lm.namespace import model_of
from megascale.convert.tensor_map import model_tensors
from megascale.core.errors import CheckpointError
from megascale.core.storage import Location
from megascale.parallel.stateful import BALANCE_BIAS, WEIGHTS
from tests.convert.megatron_lm.cases import GPT_ARGUMENTS, LLAMA_ARGUMENTS, MIXTURE_ARGUMENTS, MODELS
from tests.runs import GPT, LLAMA, config_of, settings

MIXTURE = MODELS["mixture"] | {
    "router_score": "sigmoid", "balance_bias": True, "shared_gate": True, "vocab_size": 128,
}  # fmt: skip
SCALING = {
    "type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_seq_length": 8192,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "gpt": GPT,
    "gpt tanh": GPT | {"activation": "gelu_tanh", "positions": 32, "tie_embeddings": False},
    "llama": LLAMA,
    "windows": LLAMA | {"window": [8, 8, 0, 8]},
    "llama 3": LLAMA
    | {"head_dim": 12, "qkv_bias": True, "rope_theta": 500_000.0, "norm": "rmsnorm_1p", "rope_scaling": SCALING},
    "mixture": MIXTURE,
    "mixture after a dense layer": MIXTURE | {"dense_layers": 1, "router_groups": 2, "router_group_value": "top2"},
    "mixture without gates": MODELS["mixture"] | {"activation": "gelu", "shared_ffn_size": 0},
}


def write_checkpoint(folder: Path, keys: dict[str, Any], trained: bool = True, **more: Any) -> ModelConfig:
    """Write a checkpoint of random numbers, at step 3 of 4 samples a step. `more`: of its configuration."""
    model = ModelConfig.model_validate(keys)
    generator = torch.Generator().manual_seed(1)
    states = [WEIGHTS, *(f"{moment}." for moment in MOMENTS)] if trained else [WEIGHTS]
    tensors = {
        state + tensor.name: torch.randn(tensor.shape, generator=generator)
        for state in states
        for tensor in model_tensors(model)
        if not tensor.name.startswith(BALANCE_BIAS)
    }
    if model.balance_bias:
        biases = torch.randn(model.num_layers, model.experts, generator=generator).double()
        biases[: model.dense_layers] = 0
        tensors[BALANCE_BIAS] = biases.view(-1)
    config = {"model": model.model_dump(mode="json", by_alias=True), "optimizer": {"name": "adamw", "lr": 0.5}}
    folder.mkdir()
    offline.write_state(folder, iter(tensors.items()), config | more, progress=Progress(3, 12, 192))
    return model


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint."""
    place = Location(str(folder))
    saved = manifest.read(place)
    return {name: offline.read_tensor(place, saved, name) for name in saved.tensors}


def theirs(folder: Path, keys: dict[str, Any], **more: Any) -> Path:
    """A folder of Megatron-LM, of a random checkpoint."""
    write_checkpoint(folder / "made", keys, **more)
    to_megatron(Location(str(folder / "made")), folder / "theirs")
    return folder / "theirs"


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_a_round_trip_is_exact(name: str, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "ours", SHAPES[name])
    (note,) = to_megatron(Location(str(tmp_path / "ours")), tmp_path / "theirs")
    assert "--dist-ckpt-optim-fully-reshardable" in note
    notes = from_megatron(tmp_path / "theirs", tmp_path / "again")
    assert notes[0].startswith("12 samples count as read: Megatron-LM's, in its first epoch")
    before, after = tensors_of(tmp_path / "ours"), tensors_of(tmp_path / "again")
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert after[key].equal(tensor.float().to(after[key].dtype)), key
    facts = manifest.read(Location(str(tmp_path / "again"))).facts
    assert facts.progress == Progress(3, 12, 192)
    again = ModelConfig.model_validate(facts.config["model"])
    assert again.model_dump(exclude={"window"}) == model.model_dump(exclude={"window"})


def test_groups_of_queries_gates_and_padding_are_in_their_order(tmp_path: Path) -> None:
    folder = DcpFolder(theirs(tmp_path, LLAMA) / "iter_0000003")
    ours = tensors_of(tmp_path / "made")
    for state, prefix in (("weights.", ""), ("exp_avg_sq.", "optimizer.state.exp_avg_sq.")):
        q, k, v = (ours[f"{state}layers.2.attention.{part}.weight"].unflatten(0, (-1, 8)) for part in "qkv")
        qkv = folder.read(f"{prefix}decoder.layers.self_attention.linear_qkv.weight")[2]
        assert qkv.equal(torch.cat([q[0], q[1], k[0], v[0], q[2], q[3], k[1], v[1]]))
        gate, up = (ours[f"{state}layers.1.mlp.{part}.weight"] for part in ("gate", "up"))
        assert folder.read(f"{prefix}decoder.layers.mlp.linear_fc1.weight")[1].equal(torch.cat([gate, up]))
        rows = folder.read(f"{prefix}embedding.word_embeddings.weight")
        assert rows.shape == (128, 32) and rows[:101].equal(ours[f"{state}embedding.token.weight"])
        assert not rows[101:].any()


def test_names_are_those_of_transformer_engine(tmp_path: Path) -> None:
    folder = DcpFolder(theirs(tmp_path, MIXTURE | {"dense_layers": 1}) / "iter_0000003")
    layer = "decoder.layers.1."
    assert {name.removeprefix(layer) for name in folder.tensors if name.startswith(layer)} == {
        "self_attention.linear_qkv.layer_norm_weight", "self_attention.linear_qkv.weight",
        "self_attention.linear_proj.weight", "self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight",
        "pre_mlp_layernorm.weight", "mlp.router.weight", "mlp.router.expert_bias",
        "mlp.experts.experts.linear_fc1.weight", "mlp.experts.experts.linear_fc2.weight",
        "mlp.shared_experts.linear_fc1.weight", "mlp.shared_experts.linear_fc2.weight",
        "mlp.shared_experts.gate_weight",
    }  # fmt: skip
    assert f"{layer}mlp.experts.experts.linear_fc1._extra_state/shard_3_4" in folder.objects
    assert "decoder.layers.0.mlp.linear_fc1.layer_norm_weight" in folder.tensors


def split(name: str, tensor: Tensor, tp: int) -> list[Tensor]:
    """The shards of tensor-parallel ranks, as Megatron-LM makes them."""
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return list(tensor.chunk(tp, 1))
    if "linear_fc1." in name and "layer_norm" not in name:
        gates, ups = (half.chunk(tp) for half in tensor.chunk(2))
        return [torch.cat(pair) for pair in zip(gates, ups, strict=True)]
    if "linear_qkv.weight" in name or "word_embeddings" in name or "output_layer" in name:
        return list(tensor.chunk(tp))
    return [tensor] * tp


class Backend(enum.Enum):
    """A class that Megatron-LM's arguments may have a value of."""

    auto = 1


Backend.__module__ = "megatron.core.transformer.enums"


def write_legacy(folder: Path, source: Path, tp: int, pp: int, behind: int = 0, **arguments: Any) -> Path:
    """Write the weights of a folder as ranks of tensor and pipeline parallelism do, in two model chunks each. `behind`:
    steps of later ranks.
    """
    import sys
    import types

    stored = DcpFolder(source / "iter_0000003")
    sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "vocab_size": 101}
    other = {"backend": Backend.auto, "dtype": torch.bfloat16}
    args = argparse.Namespace(**LLAMA_ARGUMENTS | sizes | other | arguments)
    modules = types.ModuleType(Backend.__module__)
    modules.Backend = Backend  # type: ignore[attr-defined]
    sys.modules[Backend.__module__], before = modules, sys.modules.get(Backend.__module__)
    for t in range(tp):
        for p in range(pp):
            chunks: list[dict[str, Any]] = [{}, {}]
            for name in stored.tensors:
                if name.startswith("optimizer."):
                    continue
                shards = split(name, stored.read(name), tp) if ".layers." not in name else []
                stages = [0] if name.startswith("embedding") else [2 * pp - 1]
                if ".layers." in name:
                    stages = list(range(2 * pp))
                for stage in stages:
                    if stage % pp != p:
                        continue
                    short = name.replace(".layers.", ".layers.0.")
                    own = split(name, stored.read(name)[stage], tp) if ".layers." in name else shards
                    chunks[stage // pp][short] = own[t]
                    chunks[stage // pp]["decoder.layers.0.mlp.linear_fc1._extra_state"] = None
            path = folder / "iter_0000003" / f"mp_rank_{t:02d}_{p:03d}"
            path.mkdir(parents=True)
            state = {"args": args, "iteration": 3 - behind * t, "optimizer": {"param_groups": []}}
            torch.save(state | {"model0": chunks[0], "model1": chunks[1]}, path / "model_optim_rng.pt")
    if before is not None:
        sys.modules[Backend.__module__] = before
    else:
        del sys.modules[Backend.__module__]
    (folder / TRACKER).write_text("3")
    return folder


def test_ranks_of_the_format_torch_are_one_model(tmp_path: Path) -> None:
    folder = write_legacy(tmp_path / "legacy", theirs(tmp_path, LLAMA), tp=2, pp=2)
    notes = from_megatron(folder, tmp_path / "again")
    assert notes == [
        "no optimizer state is read: a run begins at step 0 with the weights alone; to keep it, save it with "
        "--ckpt-format torch_dist and --dist-ckpt-optim-fully-reshardable",
        "27 rows that pad the vocabulary are left out: they were part of the softmax",
    ]
    before, after = tensors_of(tmp_path / "made"), tensors_of(tmp_path / "again")
    assert after.keys() == {name for name in before if name.startswith(WEIGHTS)}
    assert all(tensor.equal(before[name]) for name, tensor in after.items())


def test_experts_may_be_one_tensor(tmp_path: Path) -> None:
    """Those of GroupedMLP, which views its weights as [experts, in, out]."""
    stored = DcpFolder(theirs(tmp_path, MODELS["mixture"]) / "iter_0000003")
    model: dict[str, Tensor] = {}
    for name in stored.tensors:
        for layer, tensor in enumerate(stored.read(name)) if ".layers." in name else ():
            key = name.replace(".layers.", f".layers.{layer}.").replace(".experts.experts.linear_fc", ".experts.weight")
            if ".experts.weight" in key:
                key, rows = key.removesuffix(".weight"), 32 if key.endswith("1.weight") else -1
                tensor = tensor.transpose(1, 2).reshape(rows, -1 if rows == 32 else 32)
            model |= {} if name.startswith("optimizer.") else {key: tensor}
        if ".layers." not in name and not name.startswith("optimizer."):
            model[name] = stored.read(name)
    path = tmp_path / "iter_0000003/mp_rank_00/model_optim_rng.pt"
    path.parent.mkdir(parents=True)
    args = argparse.Namespace(**MIXTURE_ARGUMENTS)
    torch.save({"args": args, "iteration": 3, "model": model}, path)
    from_megatron(path.parents[1], tmp_path / "again")
    before, after = tensors_of(tmp_path / "made"), tensors_of(tmp_path / "again")
    assert all(tensor.equal(before[name]) for name, tensor in after.items())
    assert "decoder.layers.1.mlp.experts.weight2" in model


class Code:
    """An object whose pickle calls a function of the system."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("/tmp/never",)


def change_common(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], object]:
    """A damage that changes the common state."""

    def damage(folder: Path) -> None:
        path = folder / "iter_0000003/common.pt"
        state = torch.load(path, weights_only=False)
        change(state)
        torch.save(state, path)

    return damage


def set_argument(name: str, value: Any) -> Callable[[Path], object]:
    return change_common(lambda state: setattr(state["args"], name, value))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "theirs is no checkpoint of Megatron-LM  -> the folder of --save, which has latest_"),
    "no iteration": (
        lambda folder: shutil.rmtree(folder / "iter_0000003"),
        "latest_checkpointed_iteration.txt names iter_0000003, which is not there",
    ),
    "no number": (lambda folder: (folder / TRACKER).write_text("x"), "iteration.txt is 'x', no iteration"),
    "no shard": (lambda folder: (folder / "iter_0000003/__0_0.distcp").unlink(), "lacks the file __0_0.distcp"),
    "a short shard": (
        lambda folder: os.truncate(folder / "iter_0000003/__0_0.distcp", 1000),
        "__0_0.distcp has 1000 bytes, .metadata tells of",
    ),
    "no common state": (lambda folder: (folder / "iter_0000003/common.pt").unlink(), "has no common.pt: it is of"),
    "half a common state": (lambda folder: os.truncate(folder / "iter_0000003/common.pt", 100), "common.pt is damaged"),
    "code": (change_common(lambda state: state.update(x=Code())), "common.pt names posix.mkdir, which is not opened"),
    "a list": (
        lambda folder: torch.save([1], folder / "iter_0000003/common.pt"),
        "common.pt is not what Megatron-LM writes: the whole is a list",
    ),
    "no step": (change_common(lambda state: state.update(iteration=None)), "writes: iteration is a NoneType"),
    "a word as step": (change_common(lambda state: state.update(iteration="x")), "writes: iteration is a str"),
    "arguments in a dict": (change_common(lambda state: state.update(args={})), "writes: args is a dict"),
    "a list as schedule": (
        change_common(lambda state: state.update(opt_param_scheduler=[1])),
        "writes: opt_param_scheduler is a list",
    ),
    "a number as optimizer": (
        change_common(lambda state: state.update(optimizer=5)),
        "iter_0000003 is not what Megatron-LM writes: TypeError",
    ),
    "a word as samples": (set_argument("consumed_train_samples", "x"), "is not what Megatron-LM writes: ValueError"),
    "no layers": (set_argument("num_layers", None), "args has no num_layers"),
    "another format": (
        lambda folder: (folder / "iter_0000003/metadata.json").write_text('{"sharded_backend": "zarr"}'),
        "metadata.json says that the format is zarr",
    ),
    "half a format": (
        lambda folder: (folder / "iter_0000003/metadata.json").write_text("{"),
        "metadata.json is not JSON",
    ),
    "a clamp": (
        change_common(lambda state: vars(state["args"]).update(activation_func_clamp_value=7.0)),
        "args: activation_func_clamp_value is 7.0: not supported but 7 with --quick-geglu",
    ),
    "no arguments": (
        change_common(lambda state: state.pop("args")),
        "has no args, which would tell its model  -> give",
    ),
    "sharded otherwise": (
        change_common(lambda state: state["optimizer"].update(param_state_sharding_type="dp_zero_gather_scatter")),
        "the optimizer is stored as dp_zero_gather_scatter  -> save it with --ckpt-format torch_dist and --dist-ckpt",
    ),
    "no buckets": (
        change_common(lambda state: state["optimizer"].update(param_state_sharding_type="dp_reshardable")),
        "the optimizer is stored as dp_reshardable, of experts or of other ranks than its args say  -> save it with",
    ),
    "unsupported": (
        set_argument("multi_latent_attention", True),
        "is of a model with layers.0.attention.kv_latent.weight, a",
    ),
    "positions": (
        set_argument("position_embedding_type", "yarn"),
        "args: position_embedding_type is 'yarn': no value of model.position means it",
    ),
    "gains around 1": (
        change_common(lambda state: vars(state["args"]).update(normalization="LayerNorm", apply_layernorm_1p=True)),
        "args: apply_layernorm_1p is True: LayerNorm has no gains around 1",
    ),
    "another width": (
        set_argument("ffn_hidden_size", 47),
        "decoder.layers.0.mlp.linear_fc1.weight has shape [96, 32], the model has [94, 32]",
    ),
    "more tensors": (set_argument("untie_embeddings_and_output_weights", False), "has 1 tensors unknown to the mod"),
    "fewer layers": (
        set_argument("num_layers", 3),
        "has 6 tensors unknown to the model: decoder.layers.mlp.linear_fc1.layer_norm_weight[3], decoder.layers.mlp.",
    ),
    "more rows than padding": (
        change_common(lambda state: vars(state["args"]).update(vocab_size=96, make_vocab_size_divisible_by=32)),
        "embedding.word_embeddings.weight has shape [128, 32], the model has [96, 32]",
    ),
}


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return theirs(tmp_path_factory.mktemp("intact"), LLAMA)


@pytest.mark.parametrize("name", sorted(DAMAGES))
def test_what_is_refused_is_said_in_a_line(name: str, intact: Path, tmp_path: Path) -> None:
    damage, words = DAMAGES[name]
    damage(folder := shutil.copytree(intact, tmp_path / "theirs"))
    with pytest.raises(CheckpointError) as error:
        from_megatron(folder, tmp_path / "again")
    assert words in str(error.value) and "\n" not in str(error.value)
    assert {path.name for path in tmp_path.iterdir()} <= {"theirs"}
    assert not Path("/tmp/never").exists()


@pytest.mark.parametrize(
    ("size", "words"),
    [(1, "has mp_rank_01_000, and its args say tp 1, pp 2"), (4, "lacks mp_rank_02_000, and its args say tp 4")],
)
def test_ranks_are_those_that_the_arguments_say(size: int, words: str, tmp_path: Path) -> None:
    source = theirs(tmp_path, LLAMA)
    folder = write_legacy(tmp_path / "legacy", source, tp=2, pp=2, tensor_model_parallel_size=size)
    with pytest.raises(CheckpointError, match=words):
        from_megatron(folder, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_what_megatron_lm_cannot_compute_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "ours", LLAMA | {"block": "sandwich"})
    with pytest.raises(CheckpointError, match=r"arguments do not express this model, but one with block = 'serial'"):
        to_megatron(Location(str(tmp_path / "ours")), tmp_path / "theirs")
    assert not (tmp_path / "theirs").exists()


def test_a_weight_that_megatron_lm_does_not_normalize_is_refused(tmp_path: Path) -> None:
    one = MODELS["mixture"] | {"router_score": "sigmoid", "experts_per_token": 1}
    write_checkpoint(tmp_path / "ours", one)
    with pytest.raises(CheckpointError, match="this model, but one with router_normalize = False"):
        to_megatron(Location(str(tmp_path / "ours")), tmp_path / "theirs")
    write_checkpoint(tmp_path / "fixed", one | {"router_normalize": False})
    to_megatron(Location(str(tmp_path / "fixed")), tmp_path / "theirs")


def test_weights_without_moments_are_a_release(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "ours", LLAMA, trained=False)
    (note,) = to_megatron(Location(str(tmp_path / "ours")), tmp_path / "theirs")
    assert note == "no optimizer state of Adam: the weights alone are written, as a release"
    assert (tmp_path / "theirs" / TRACKER).read_text() == "release"
    from_megatron(tmp_path / "theirs", tmp_path / "again")
    assert manifest.read(Location(str(tmp_path / "again"))).facts.progress == Progress()


def test_a_configuration_tells_what_the_folder_does_not(tmp_path: Path) -> None:
    folder = theirs(tmp_path, LLAMA)
    config = config_of(settings(LLAMA, tmp_path, batch__global=4), tmp_path)
    change_common(lambda state: state.pop("args"))(folder)
    from_megatron(folder, tmp_path / "again", config)
    facts = manifest.read(Location(str(tmp_path / "again"))).facts
    assert facts.progress == Progress(3, 12, 192) and facts.config["optimizer"]["lr"] == 1e-2


@pytest.mark.parametrize(("steps", "told"), [(3, False), (4, True)])
def test_a_rate_that_differs_in_the_warm_up_is_told(steps: int, told: bool, tmp_path: Path) -> None:
    folder = theirs(tmp_path, LLAMA)
    change_common(lambda state: state["opt_param_scheduler"].update(lr_warmup_steps=4 * steps))(folder)
    notes = from_megatron(folder, tmp_path / "again")
    assert told == any(note.startswith("the learning rate is above Megatron-LM's") for note in notes)


def test_a_configuration_of_another_model_is_refused(tmp_path: Path) -> None:
    config = config_of(settings(LLAMA | {"qk_norm": "head"}, tmp_path), tmp_path)
    with pytest.raises(CheckpointError, match="another model: qk_norm none there, head here"):
        from_megatron(theirs(tmp_path, LLAMA), tmp_path / "again", config)


@pytest.mark.parametrize(("key", "value"), [
    ("rope_theta", 5e5), ("norm_eps", 1e-3), ("rotary_fraction", 0.5), ("window", 4), ("vocab_size", 120),
    ("rope_scaling", {"type": "linear", "factor": 2.0}),
])  # fmt: skip
def test_a_configuration_that_computes_otherwise_is_refused(key: str, value: Any, tmp_path: Path) -> None:
    config = config_of(settings(LLAMA | {key: value}, tmp_path), tmp_path)
    with pytest.raises(CheckpointError, match=f"another model: {key} .* there, .* here"):
        from_megatron(theirs(tmp_path, LLAMA), tmp_path / "again", config)
    assert not (tmp_path / "again").exists()


def test_ranks_of_several_iterations_are_refused(tmp_path: Path) -> None:
    folder = write_legacy(tmp_path / "legacy", theirs(tmp_path, LLAMA), tp=2, pp=2, behind=1)
    with pytest.raises(CheckpointError, match="mp_rank_01_000 is of iteration 2, the first rank of"):
        from_megatron(folder, tmp_path / "again")


SMALLER = {
    "layers": ("llama", {"num_layers": 3}, False, "linear_fc1.layer_norm_weight[3], "),
    "experts": ("mixture", {"experts": 2}, False, "router.weight has shape [4, 32], the model has [2, 32]"),
    "vocabulary": ("llama", {"vocab_size": 2}, True, "of another model: vocab_size 101 there, 2 here"),
    "vocabulary, no arguments": ("llama", {"vocab_size": 2}, False, "has shape [128, 32], the model has [2, 32]"),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(SMALLER))
def test_no_part_of_a_larger_model_is_read(name: str, tmp_path: Path) -> None:
    kind, sizes, with_args, words = SMALLER[name]
    folder = theirs(tmp_path, SHAPES[kind])
    if not with_args:
        change_common(lambda state: state.pop("args"))(folder)
    config = config_of(settings(SHAPES[kind] | sizes, tmp_path, batch__global=4), tmp_path)
    with pytest.raises(CheckpointError) as error:
        from_megatron(folder, tmp_path / "again", config)
    assert words in str(error.value) and not (tmp_path / "again").exists()


def test_the_command_goes_both_ways(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path / "ours", GPT, batch={"global": 4}, train={"steps": 9, "precision": "bf16"})
    assert main(["ckpt", "convert", str(tmp_path / "ours"), f"megatron:{tmp_path / 'theirs'}"]) == 0
    common = read_common(tmp_path / "theirs/iter_0000003/common.pt")
    assert vars(common["args"])["params_dtype"] == torch.bfloat16
    assert common["opt_param_scheduler"]["num_steps"] == 12 and common["opt_param_scheduler"]["lr_decay_steps"] == 36
    assert json.loads((tmp_path / "theirs/iter_0000003/metadata.json").read_text())["sharded_backend"] == "torch_dist"
    assert main(["ckpt", "convert", f"megatron:{tmp_path / 'theirs'}", str(tmp_path / "again")]) == 0
    assert tensors_of(tmp_path / "again").keys() == tensors_of(tmp_path / "ours").keys()
    assert main(["ckpt", "convert", f"megatron:{tmp_path}", str(tmp_path / "third")]) == 4
    assert f"{tmp_path} is no checkpoint of Megatron-LM" in capsys.readouterr().err
    for folder in (tmp_path / "theirs", tmp_path / "theirs/iter_0000003"):
        assert main(["ckpt", "convert", str(folder), str(tmp_path / "third")]) == 4
        assert f"as a folder of another system  -> write megatron:{folder}" in capsys.readouterr().err


def test_arguments_of_a_gelu_model_are_read(tmp_path: Path) -> None:
    """Of Megatron-LM's fused activation the tanh form is the default."""

    def read(**arguments: Any) -> ModelConfig:
        return model_of(GPT_ARGUMENTS | arguments, "args")

    assert (read().activation, read(bias_gelu_fusion=True).activation) == ("gelu", "gelu_tanh")
    assert (read().vocab_size, read(vocab_size=101).vocab_size) == (128, 101)
    assert read(rotary_interleaved=False).position_rows == 16

"""Weights convert to and from Hugging Face's layout bit-exactly, and transformers computes the same logits."""

from __future__ import annotations

import copy
import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from megascale.checkpoint import folders, offline
from megascale.checkpoint.companions import DATA_TOKENIZER
from megascale.checkpoint.format import manifest
from megascale.cli.main import main
from megascale.config.model import ModelConfig, model_differences
from megascale.convert import huggingface
from megascale.convert.config_file import CONFIG_FILE
from megascale.convert.conversion import from_huggingface, to_huggingface
from megascale.convert.families.config_json import read_model
from megascale.convert.huggingface import INDEX_FILE, WEIGHTS_FILE, PretrainedWeights
from megascale.convert.saved_weights import read_model_section
from megascale.convert.tensor_map import model_tensors
from megascale.core.errors import CheckpointError, DataError
from megascale.core.files import fingerprint
from megascale.core.rank import Rank
from megascale.core.storage import Location
from megascale.parallel.stateful import WEIGHTS as WEIGHT
from tests.logits import logits_of
from tests.marks import only_quick
from tests.oracles.ours import MODELS, Array, Arrays, Piece, join
from tests.oracles.test_transformers import build, ours_from_gpt2, ours_from_llama
from tests.runs import FAMILIES, GPT, LLAMA, build_run, config_of, settings
from tests.worlds import RankFailed, run_world

BIASED = LLAMA | {"bias": True}


def pretrained(model: dict[str, Any], folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Save a random model to a folder with transformers. Returns the model."""
    net = build(model).to(dtype)
    net.save_pretrained(folder, **options)
    return net


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        weights |= load_file(path)
    return weights


def equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(
        ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor) for name, tensor in theirs.items()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_round_trip_is_exact(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    pretrained(MODELS[name], tmp_path / "theirs", dtype)
    (tmp_path / "theirs/tokenizer.json").write_text("{}")
    from_huggingface(tmp_path / "theirs", tmp_path / "ours")
    to_huggingface(Location(str(tmp_path / "ours")), tmp_path / "again")
    assert equal(weights_in(tmp_path / "again"), weights_in(tmp_path / "theirs"))
    before, after = (json.loads((tmp_path / folder / CONFIG_FILE).read_text()) for folder in ("theirs", "again"))
    assert {key: after.get(key) for key in before} == before
    assert (tmp_path / "again/tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize("name", MODELS)
def test_the_model_is_that_of_the_oracles(tmp_path: Path, name: str) -> None:
    """tests/oracles compares the logits and gradients of these models."""
    net = pretrained(MODELS[name], tmp_path / "theirs")
    given = PretrainedWeights(tmp_path / "theirs")
    given.check_tensors()
    wanted = ModelConfig.model_validate(MODELS[name])
    assert given.model.model_copy(update={"window": wanted.window}) == wanted
    assert given.model.windows == wanted.windows
    rename = ours_from_llama if "position" in MODELS[name] else ours_from_gpt2
    theirs = rename({key: p.detach().numpy() for key, p in net.named_parameters()})
    assert theirs.keys() == {tensor.name for tensor in model_tensors(given.model)}
    for key, numbers in theirs.items():
        assert np.array_equal(given.read_tensor(key).numpy(), numbers)
        start, size = tuple(n // 3 for n in numbers.shape), tuple(n - n // 2 for n in numbers.shape)
        part = numbers[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))]
        assert np.array_equal(given.read_tensor(key, (start, size)).numpy(), part)


@pytest.mark.parametrize(
    "model",
    only_quick(
        [GPT | {"activation": "gelu_tanh"}, LLAMA, BIASED, LLAMA | {"window": 5}],
        GPT | {"activation": "gelu_tanh"},
        LLAMA | {"window": 5},
    ),
    ids=str,
)
def test_transformers_loads_what_was_trained(tmp_path: Path, model: dict[str, Any]) -> None:
    """The exported weights equal the run's final weights, and transformers computes the same logits."""
    import transformers

    given = config_of(settings(model, tmp_path, train__precision="fp32", checkpoint__every=1), tmp_path)
    ((weights, tokens, logits),) = run_world(1, trained, given)
    to_huggingface(folders.find_checkpoint(Location(str(given.folder))), tmp_path / "theirs")
    net = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", attn_implementation="eager")
    assert net.dtype == torch.float32
    with torch.no_grad():
        their_logits = net(torch.from_numpy(tokens)).logits
    np.testing.assert_allclose(their_logits.numpy(), logits, rtol=1e-4, atol=1e-5)
    again = PretrainedWeights(tmp_path / "theirs")
    assert all(np.array_equal(again.read_tensor(name).numpy(), numbers) for name, numbers in weights.items())


def trained(rank: Rank, config: Any) -> tuple[Arrays, Array, Array]:
    """Train two steps and save. Returns the weights, some tokens and their logits."""
    from megascale.train.step import train_step

    run = build_run(rank, config)
    for _ in range(2):
        train_step(run, run.train_loader.batch(run.progress.samples))
    run.buffers.finish_param_gather()
    run.checkpoints.save(run.progress)
    batch, (stage,) = run.train_loader.batch(0), run.stages
    logits = logits_of(stage, batch.micro_batches[0]).transpose(0, 1)
    shapes = {tensor.name: tensor.shape for tensor in model_tensors(config.model)}
    tokens = batch.micro_batches[0].tokens.t()
    return join(shapes, [masters(run)]), tokens.numpy(), logits[..., : config.model.vocab_size].numpy()


def masters(run: Any) -> list[Piece]:
    """This rank's shard of the master weights."""
    pieces = []
    for name, tensor in run.optimizer.global_tensors().items():
        for piece in tensor.shards if name.startswith(WEIGHT) else []:
            box = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.size, strict=True))
            pieces.append((name.removeprefix(WEIGHT), box, piece.data.numpy().copy()))
    return pieces


BEGUN: list[tuple[str, int, dict[str, Any]]] = [
    ("gpt gelu_tanh tied", 4, {"parallel__tp": 2, "parallel__pp": 2, "parallel__sp": True}),
    ("llama untied", 4, {"parallel__tp": 2, "parallel__pp": 2, "parallel__sp": True}),
    ("llama untied", 2, {"parallel__dp": 2, "parallel__zero": 0}),
    ("llama untied", 2, {"parallel__dp": 2, "parallel__zero": 1}),
    ("gpt gelu_tanh tied", 4, {"parallel__dp": 2, "parallel__pp": 2, "parallel__zero": 0}),
    ("llama untied", 2, {"parallel__dp": 2, "parallel__zero": 2, "train__precision": "bf16"}),
]


@pytest.mark.parametrize("case", only_quick(BEGUN, BEGUN[-1]), ids=str)
def test_a_run_begins_with_a_checkpoint_or_a_hugging_face_folder(
    tmp_path: Path, case: tuple[str, int, dict[str, Any]]
) -> None:
    name, world, layout = case
    pretrained(MODELS[name], tmp_path / "theirs", torch.bfloat16)
    from_huggingface(tmp_path / "theirs", tmp_path / "ours")
    layout = {"train__precision": "fp32"} | layout
    runs = []
    for number, resume in enumerate((f"hf:{tmp_path / 'theirs'}", str(tmp_path / "ours"))):
        tree = settings(MODELS[name], tmp_path / str(number), checkpoint__resume=resume, **layout)
        runs.append(run_world(world, begun, config_of(tree, tmp_path)))
    assert {line for line, _, _ in runs[0]} == {f"begins with the weights of {tmp_path / 'theirs'}"}
    assert all(line.startswith(f"resumed from {tmp_path / 'ours'}: step 0") for line, _, _ in runs[1])
    given = PretrainedWeights(tmp_path / "theirs")
    shapes = {tensor.name: tensor.shape for tensor in model_tensors(given.model)}
    for run in runs:
        weights = join(shapes, [pieces for _, pieces, _ in run])
        assert all(np.array_equal(given.read_tensor(key).float().numpy(), array) for key, array in weights.items())
    assert [curve for _, _, curve in runs[0]] == [curve for _, _, curve in runs[1]]


def begun(rank: Rank, config: Any) -> tuple[str, list[Piece], list[tuple[float, float]]]:
    """Load the initial weights and train two steps. Returns the message, the weights and the curve."""
    from megascale.train.resume import load_initial_state
    from tests.runs import curve_of

    run = build_run(rank, config)
    line = load_initial_state(run, PretrainedWeights)
    run.buffers.finish_param_gather()
    return line, masters(run), curve_of(run, 2)


def test_weights_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((huggingface, "MAX_SHARD_BYTES"), (offline, "FILE_BYTES")):
        monkeypatch.setattr(module, name, 20_000)
    pretrained(LLAMA | {"rope_theta": 1e4}, tmp_path / "theirs", max_shard_size="20KB")
    assert (tmp_path / "theirs" / INDEX_FILE).exists()
    from_huggingface(tmp_path / "theirs", tmp_path / "ours")
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 3
    to_huggingface(Location(str(tmp_path / "ours")), tmp_path / "again")
    index = json.loads((tmp_path / "again" / INDEX_FILE).read_text())
    weights = weights_in(tmp_path / "again")
    assert equal(weights, weights_in(tmp_path / "theirs"))
    assert index["weight_map"].keys() == weights.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights.values())
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "again" / file)
    largest = max(tensor.nbytes for tensor in weights.values())
    for path in (tmp_path / "again").glob("*.safetensors"):
        assert path.stat().st_size < max(20_000, largest) + 4_000


def drawn(model: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Random weights by their megascale names."""
    return {tensor.name: torch.randn(tensor.shape) for tensor in model_tensors(ModelConfig.model_validate(model))}


def written(folder: Path, weights: dict[str, torch.Tensor], model: Any = LLAMA, **config: Any) -> Location:
    """Write a checkpoint of the weights."""
    folder.mkdir()
    resolved = ModelConfig.model_validate(model).model_dump(mode="json", by_alias=True)
    offline.write_state(
        folder, ((f"weights.{name}", weight) for name, weight in weights.items()), {"model": resolved, **config}
    )
    return Location(str(folder))


def test_mixed_dtypes_are_promoted_to_a_dtype_that_holds_both(tmp_path: Path) -> None:
    weights = {name: tensor.half() if "norm" in name else tensor.bfloat16() for name, tensor in drawn(LLAMA).items()}
    to_huggingface(written(tmp_path / "ours", weights), tmp_path / "theirs")
    again = PretrainedWeights(tmp_path / "theirs")
    for name, tensor in weights.items():
        assert torch.equal(again.read_tensor(name), tensor.float())


def test_early_exits_are_left_out(tmp_path: Path) -> None:
    model = LLAMA | {"exits": [1, 3]}
    weights = drawn(model)
    assert (
        "no early exits included" in to_huggingface(written(tmp_path / "ours", weights, model), tmp_path / "theirs")[-1]
    )
    again = PretrainedWeights(tmp_path / "theirs")
    again.check_tensors()
    assert {tensor.name for tensor in again.tensors} == {name for name in weights if not name.startswith("exits.")}


def test_the_tokenizer_is_included_or_its_absence_is_explained(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    made = Tokenizer(WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    made.add_special_tokens(["</s>"])
    made.save(str(file))
    weights = drawn(LLAMA)
    there = written(tmp_path / "there", weights, data={"tokenizer": str(file)})
    gone = written(tmp_path / "gone", weights, data={"tokenizer": str(tmp_path / "gone.json")})
    assert to_huggingface(there, tmp_path / "one") == []
    (told,) = to_huggingface(gone, tmp_path / "two")
    assert f"there is no file {tmp_path}/gone.json on this host; give --tokenizer FILE" in told
    assert to_huggingface(gone, tmp_path / "three", tokenizer=file) == []
    texts = [(tmp_path / name / "config.json").read_text() for name in ("one", "two", "three")]
    assert texts[0] == texts[2] and '"eos_token_id"' in texts[0]
    assert not (tmp_path / "two/tokenizer.json").exists()
    assert (tmp_path / "three/tokenizer.json").read_bytes() == file.read_bytes()
    plain = written(tmp_path / "plain", weights, data={"tokenizer": "bytes"})
    (told,) = to_huggingface(plain, tmp_path / "four")
    assert "'bytes' has no file; use megascale sample --tokenizer bytes" in told


def test_an_unusable_tokenizer_or_that_of_another_model_is_refused(tmp_path: Path) -> None:
    none, large = tmp_path / "none.json", tmp_path / "large.json"
    none.write_text("[model]")
    Tokenizer(WordLevel({"a": 0, "b": 101}, unk_token="a")).save(str(large))
    weights = drawn(LLAMA)
    plain = written(tmp_path / "plain", weights)
    for file, words in ((none, "is not a tokenizer: "), (large, "has tokens up to 101, but model.vocab_size is 101")):
        with pytest.raises(DataError, match=f"{file} {words}"):
            to_huggingface(plain, tmp_path / "theirs", tokenizer=file)
        assert not list(tmp_path.glob("*theirs*"))
        configured = written(tmp_path / f"of {file.stem}", weights, data={"tokenizer": str(file)})
        (told,) = to_huggingface(configured, tmp_path / f"for {file.stem}")
        assert told.startswith(f"no tokenizer included: {file} {words}")
        assert told.endswith("give another with --tokenizer FILE")


def test_the_tokenizer_of_the_training_data_may_have_more_tokens_than_the_model(tmp_path: Path) -> None:
    """Those that occurred were below the size of the model, or training had refused them."""
    file = tmp_path / "tokens.json"
    Tokenizer(WordLevel({"a": 0, "</s>": 1, "never": 101}, unk_token="a")).save(str(file))
    source = written(tmp_path / "ours", drawn(LLAMA), data={"tokenizer": str(file)})
    info = {"name": str(file), "fingerprint": fingerprint(file), "eod": 1, "eod_origin": "given", "bos": None}
    (tmp_path / "ours" / DATA_TOKENIZER).write_text(json.dumps(info))
    assert to_huggingface(source, tmp_path / "theirs") == []
    assert (tmp_path / "theirs/tokenizer.json").read_bytes() == file.read_bytes()


def test_training_on_shorter_sequences_loses_no_learned_position(tmp_path: Path) -> None:
    pretrained(GPT | {"activation": "gelu_tanh"}, tmp_path / "theirs")
    section = read_model_section(Location(str(tmp_path / "theirs")))
    assert (section["seq_length"], section["positions"]) == (16, 16)
    shorter = section | {"seq_length": 10}
    assert ModelConfig.model_validate(shorter).position_rows == 16
    assert model_differences(section, ModelConfig.model_validate(shorter)) == ""
    dropped = ModelConfig.model_validate({key: value for key, value in shorter.items() if key != "positions"})
    assert model_differences(section, dropped) == "positions 16 there, 10 here", "refused, not cut"
    weights = {name: PretrainedWeights(tmp_path / "theirs").read_tensor(name) for name in drawn(GPT)}
    to_huggingface(written(tmp_path / "ours", weights, shorter), tmp_path / "again")
    assert equal(weights_in(tmp_path / "again"), weights_in(tmp_path / "theirs"))
    assert json.loads((tmp_path / "again" / CONFIG_FILE).read_text())["n_positions"] == 16


def test_weights_that_git_lfs_has_not_fetched_are_named_as_such(tmp_path: Path) -> None:
    pretrained(GPT | {"activation": "gelu_tanh"}, tmp_path / "theirs")
    for name in (WEIGHTS_FILE, CONFIG_FILE):
        path = tmp_path / "theirs" / name
        path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
        with pytest.raises(CheckpointError, match=f"^{path} is a git-lfs pointer, not the file itself: "):
            PretrainedWeights(tmp_path / "theirs").check_tensors()


def test_weights_are_cast_to_another_dtype(tmp_path: Path) -> None:
    pretrained(GPT | {"activation": "gelu"}, tmp_path / "theirs")
    from_huggingface(tmp_path / "theirs", tmp_path / "ours", torch.bfloat16)
    assert {tensor.dtype for tensor in manifest.read(Location(str(tmp_path / "ours"))).tensors.values()} == {"bfloat16"}
    to_huggingface(Location(str(tmp_path / "ours")), tmp_path / "again", torch.float16)
    assert {tensor.dtype for tensor in weights_in(tmp_path / "again").values()} == {torch.float16}
    config = json.loads((tmp_path / "again" / CONFIG_FILE).read_text())
    assert {config[key] for key in ("dtype", "torch_dtype") if key in config} == {"float16"}
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(tmp_path / "again").dtype == torch.float16


def test_a_full_disk_is_a_one_line_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretrained(GPT | {"activation": "gelu"}, tmp_path / "theirs")
    from_huggingface(tmp_path / "theirs", tmp_path / "ours")
    # Python would write compiled modules up to the limit, and all later processes would fail to load them.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20 << 10, limits[1]))
    try:
        status = main(["ckpt", "convert", f"{tmp_path}/ours", f"{tmp_path}/again"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    err = capsys.readouterr().err
    assert status == 4 and "Traceback" not in err, err
    assert f"cannot convert into {tmp_path}/again: " in err and not (tmp_path / "again").exists()


def changed(folder: Path, **keys: Any) -> None:
    config = json.loads((folder / CONFIG_FILE).read_text()) | keys
    (folder / CONFIG_FILE).write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


@pytest.mark.parametrize(
    ("family", "keys", "words"),
    [
        ("llama", {"model_type": "mamba"}, "model_type is 'mamba'  -> a model of gpt2, llama, mistral"),
        ("llama", {"model_type": ...}, "model_type is None"),
        ("llama", {"rope_parameters": {"rope_type": "longrope"}}, "rope_type is 'longrope', not default or linear or"),
        ("llama", {"rope_scaling": {"type": "su"}}, "rope_type is 'su', not default or linear or"),
        ("llama", {"rope_scaling": {"rope_type": "yarn"}}, "as rope_scaling: yarn needs factor"),
        ("llama", {"attention_bias": True}, "mlp_bias is False, not True"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu', not 'silu'"),
        ("llama", {"head_dim": 16}, "q_proj.weight has shape [32, 32], its config.json says [64, 32]"),
        ("llama", {"hidden_size": ...}, "no 'hidden_size'"),
        ("llama", {"model_type": ["llama"]}, "model_type is ['llama']  -> a model of gpt2, llama, mistral"),
        ("llama", {"rope_parameters": [1]}, "a value of the wrong type: rope_parameters is [1]"),
        ("llama", {"hidden_size": "wide"}, "'wide' as hidden_size: Input should be"),
        ("llama", {"vocab_size": "many"}, "'many' as vocab_size: Input should be a valid integer"),
        ("llama", {"num_attention_heads": 0}, "config.json: num_attention_heads is 0, not above 0"),
        (
            "llama",
            {"num_attention_heads": 5, "head_dim": ...},
            "hidden_size is 32, not a multiple of num_attention_heads = 5",
        ),
        ("llama", {"num_key_value_heads": 0}, "num_key_value_heads is 0, not above 0"),
        ("llama", {"hidden_size": -32}, "hidden_size is -32, not above 0"),
        ("llama", {"model_type": "mistral", "sliding_window": 0}, "sliding_window is 0, not above 0"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, not 1.0"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5, not 1.0"),
        (
            "llama",
            {"quantization_config": {"quant_method": "fp8"}},
            "the weights are quantized, it has quantization_config, by quant_method 'fp8'",
        ),
        ("llama", {"compression_config": {"format": "int"}}, "the weights are quantized, it has compression_config"),
        ("llama", {"quantization": {"bits": 4}}, "the weights are quantized, it has quantization"),
        ("llama", {"tie_word_embeddings": True}, "true, but lm_head.weight is not equal to model.embed_tokens.weight"),
        ("llama", {"vocab_size": 102}, "model.embed_tokens.weight has shape [101, 32], its config.json says [102, 32]"),
        ("llama", {"num_hidden_layers": 5}, "has no tensor model.layers.4.input_layernorm.weight"),
        ("llama", {"num_hidden_layers": 3}, "has 9 tensors unknown to its config.json"),
        ("gpt", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True, not False"),
        ("gpt", {"n_head": 0}, "n_head is 0, not above 0"),
        ("gpt", {"n_head": 3}, "n_embd is 32, not a multiple of n_head = 3"),
        ("gpt", {"n_inner": 0}, "n_inner is 0, not above 0"),
        ("gpt", {"activation_function": "relu"}, "activation_function is 'relu', not 'gelu_new'"),
    ],
)
def test_an_unsupported_model_is_refused(tmp_path: Path, family: str, keys: Any, words: str) -> None:
    pretrained(FAMILIES[family] | {"activation": "gelu"} if family == "gpt" else LLAMA | {"rope_theta": 1e4}, tmp_path)
    changed(tmp_path, **keys)
    with pytest.raises(CheckpointError) as caught:
        from_huggingface(tmp_path, tmp_path / "ours")
    assert words in str(caught.value)
    assert not list(tmp_path.glob("*ours*"))


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"rope_theta": 3e4},
        {"rope_scaling": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_theta": 3e4, "rope_scaling": {"rope_type": "default"}},
        {"rope_theta": 3e4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_parameters": {"rope_theta": 2e4}, "rope_scaling": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_theta": 3e4, "rope_parameters": {"rope_theta": 5e5}, "rope_scaling": {"type": "default"}},
    ],
    ids=str,
)
def test_rope_theta_is_that_of_transformers(keys: dict[str, Any]) -> None:
    from transformers import LlamaConfig

    plain = {
        "model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1,
        "intermediate_size": 48, "vocab_size": 101,
    }  # fmt: skip
    theirs = LlamaConfig.from_dict(plain | copy.deepcopy(keys)).rope_parameters["rope_theta"]
    assert read_model(plain | keys, "config.json").rope_theta == theirs


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_quantized_dtypes_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    pretrained(LLAMA | {"rope_theta": 1e4}, tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    weights = load_file(tmp_path / WEIGHTS_FILE)
    save_file(weights | {name: weights[name].to(dtype)}, tmp_path / WEIGHTS_FILE)
    words = f"{WEIGHTS_FILE}: {name} is stored as (F8_E4M3|I8)  -> the weights before"
    with pytest.raises(CheckpointError, match=words):
        from_huggingface(tmp_path, tmp_path / "ours")
    assert not list(tmp_path.glob("*ours*"))
    with pytest.raises(RankFailed, match=words):
        run_world(1, begun, config_of(settings(LLAMA, tmp_path, checkpoint__resume=f"hf:{tmp_path}"), tmp_path))


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_a_head_beside_tied_embeddings_must_equal_them(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison is bit-exact, in chunks of rows."""
    monkeypatch.setattr(huggingface, "COMPARE_CHUNK_BYTES", 10_000)
    model = {"llama": LLAMA | {"rope_theta": 1e4, "tie_embeddings": True}, "gpt": GPT | {"activation": "gelu"}}[family]
    embedding = {"llama": "model.embed_tokens.weight", "gpt": "transformer.wte.weight"}[family]
    pretrained(model, tmp_path)
    weights = load_file(tmp_path / WEIGHTS_FILE)
    last, zero = weights[embedding].clone(), weights[embedding].clone()
    last[-1, -1] += 1
    zero[3, 5] = 0.0
    save_file(weights | {"lm_head.weight": weights[embedding].clone()}, tmp_path / WEIGHTS_FILE)
    from_huggingface(tmp_path, tmp_path / "ours")
    assert f"{WEIGHT}head.weight" not in manifest.read(Location(str(tmp_path / "ours"))).tensors
    unequal = [(weights[embedding], last), (zero, torch.where(zero == 0, -0.0, zero))]
    unequal += [(zero, zero[:-1].clone()), (zero, zero.double())]
    for embedded, head in unequal:
        save_file(weights | {embedding: embedded, "lm_head.weight": head}, tmp_path / WEIGHTS_FILE)
        with pytest.raises(CheckpointError, match=f"lm_head.weight is not equal to {embedding}"):
            PretrainedWeights(tmp_path).check_tensors()


def test_a_dtype_in_which_an_element_overflows_is_refused(tmp_path: Path) -> None:
    name, theirs = "layers.2.mlp.up.weight", "model.layers.2.mlp.up_proj.weight"
    weights = drawn(LLAMA)
    weights["layers.0.mlp.up.weight"][0, 0] = torch.inf  # infinite before the cast: accepted
    weights[name][3, 5] = -1e5
    ours = written(tmp_path / "ours", weights)
    to_huggingface(ours, tmp_path / "theirs")
    words = r"overflows in float16: 1 of its 1536 elements, up to 100000"
    with pytest.raises(CheckpointError, match=f"ours: {name} {words}"):
        to_huggingface(ours, tmp_path / "half", torch.float16)
    with pytest.raises(CheckpointError, match=f"theirs: {theirs} {words}"):
        from_huggingface(tmp_path / "theirs", tmp_path / "half", torch.float16)
    assert not list(tmp_path.glob("*half*"))
    from_huggingface(tmp_path / "theirs", tmp_path / "half", torch.bfloat16)
    weights[name][3, 5] = torch.finfo(torch.float32).max
    with pytest.raises(CheckpointError, match="overflows in bfloat16: 1 of its"):
        to_huggingface(written(tmp_path / "largest", weights), tmp_path / "again", torch.bfloat16)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            lambda folder: (folder / WEIGHTS_FILE).rename(folder / "pytorch_model.bin"),
            "has neither model.safetensors nor model.safetensors.index.json; pytorch_model.bin is a pickle",
        ),
        (
            lambda folder: (folder / INDEX_FILE).write_text('{"weight_map": {"a": "b.safetensors"}}'),
            "has model.safetensors, and model.safetensors.index.json, which names other files",
        ),
        (
            lambda folder: (folder / WEIGHTS_FILE).rename(folder / "pytorch_model-00001-of-00002.bin"),
            "; pytorch_model-00001-of-00002.bin is a pickle",
        ),
        (lambda folder: (folder / CONFIG_FILE).write_text("{"), "is not JSON"),
        (lambda folder: (folder / CONFIG_FILE).write_text('{"a":' * 100_000), "is not JSON"),
        (lambda folder: (folder / CONFIG_FILE).write_text("[]"), "is not a JSON object"),
        (lambda folder: (folder / CONFIG_FILE).unlink(), "cannot be read: No such file"),
        (lambda folder: (folder / WEIGHTS_FILE).write_bytes(b"\0" * 100), "cannot be read"),
        (
            lambda folder: (folder / INDEX_FILE).write_text('{"weight_map": {"a": "../../x"}}'),
            "no map of weights to files",
        ),
        (lambda folder: (folder / INDEX_FILE).write_text('{"weight_map": 3}'), "no map of weights to files"),
        (lambda folder: (folder / "generation_config.json").write_text("{"), "generation_config.json is not JSON"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("[]"), "tokenizer_config.json is not a JSON"),
        (
            lambda folder: save_file(
                {f"language_model.{key}": value for key, value in weights_in(folder).items()}, folder / WEIGHTS_FILE
            ),
            "has no tensor model.embed_tokens.weight  -> tensors are named language_model.NAME, as in a model of text",
        ),
    ],
)
def test_a_damaged_folder_is_named(tmp_path: Path, damage: Any, words: str) -> None:
    pretrained(LLAMA | {"rope_theta": 1e4}, tmp_path)
    damage(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        from_huggingface(tmp_path, tmp_path / "ours")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (GPT | {"block": "parallel"}, "block = 'serial'"),
        (GPT | {"window": 4}, "gpt2 has window = None"),
        (LLAMA | {"window": [4, 0]}, "mistral has window = 4"),
        (BIASED | {"window": 4}, "mistral has bias = False"),
        (GPT | {"norm": "rmsnorm"}, "gpt2 has norm = 'layernorm'"),
    ],
)
def test_a_model_of_no_family_is_refused(tmp_path: Path, model: dict[str, Any], words: str) -> None:
    config = ModelConfig.model_validate(model)
    (tmp_path / "ours").mkdir()
    zeros = ((f"weights.{tensor.name}", torch.zeros(tensor.shape)) for tensor in model_tensors(config))
    offline.write_state(tmp_path / "ours", zeros, {"model": config.model_dump(mode="json", by_alias=True)})
    with pytest.raises(CheckpointError) as caught:
        to_huggingface(Location(str(tmp_path / "ours")), tmp_path / "theirs")
    assert words in str(caught.value)
    assert not list(tmp_path.glob("*theirs*"))


def test_old_files_of_a_bare_gpt2_are_read(tmp_path: Path) -> None:
    """These files have no prefix in their names, and hold the causal masks among the weights."""
    net = pretrained(GPT | {"activation": "gelu_tanh"}, tmp_path)
    bare = {name.removeprefix("transformer."): t for name, t in load_file(tmp_path / WEIGHTS_FILE).items()}
    save_file(bare | {"h.0.attn.bias": torch.ones(1, 1, 16, 16)}, tmp_path / WEIGHTS_FILE)
    from_huggingface(tmp_path, tmp_path / "ours")
    to_huggingface(Location(str(tmp_path / "ours")), tmp_path / "theirs")
    theirs = weights_in(tmp_path / "theirs")
    assert all(torch.equal(theirs[name], p) for name, p in net.named_parameters())


BIG = LLAMA | {"num_layers": 24, "hidden_size": 768, "num_heads": 12, "num_kv_heads": 12, "ffn_size": 3072}
PEAK = """
import resource, sys
from pathlib import Path
import torch
from megascale.checkpoint import offline
from megascale.checkpoint.companions import DATA_TOKENIZER
from megascale.core.storage import Location
from megascale.convert import conversion, huggingface
conversion.DTYPES
import safetensors.torch
source, output, size = sys.argv[1:]
huggingface.MAX_SHARD_BYTES = offline.FILE_BYTES = int(size)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
output = Path(output)
if "theirs" in source:
    conversion.from_huggingface(Path(source), output)
else:
    conversion.to_huggingface(Location(source), output)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.slow
def test_one_file_at_a_time_is_in_memory(tmp_path: Path) -> None:
    """Convert 0.9 GB in files of 32 MiB, with a peak below four files."""
    pretrained(BIG | {"rope_theta": 1e4}, tmp_path / "theirs")
    size = 32 << 20
    for source, output in (("theirs", "ours"), ("ours", "again")):
        words = [str(tmp_path / source), str(tmp_path / output), str(size)]
        done = subprocess.run([sys.executable, "-c", PEAK, *words], capture_output=True, text=True, check=True)
        assert int(done.stdout) < 4 * size
        if source == "ours":
            shutil.rmtree(tmp_path / source)
    assert equal(weights_in(tmp_path / "again"), weights_in(tmp_path / "theirs"))

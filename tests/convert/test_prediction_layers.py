"""Layers of multi-token prediction in published files: read, trained from, and written back."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy

from megascale.checkpoint import folders
from megascale.cli.initial_model import compare_initial_model
from megascale.convert.conversion import from_huggingface, to_huggingface
from megascale.convert.families.config_json import FAMILIES, read_model
from megascale.convert.huggingface import WEIGHTS_FILE, PretrainedWeights
from megascale.convert.saved_weights import read_model_section
from megascale.convert.tensor_map import stored_copies, tensor_map
from megascale.core.errors import CheckpointError, ConfigError
from megascale.core.rank import Rank
from megascale.core.storage import Location
from tests.convert.test_families import weights_in
from tests.convert.tiny import LATENT, as_saved, save_tiny
from tests.runs import build_run, config_of, settings
from tests.worlds import run_world

LAYER = "model.layers.4"


@pytest.fixture(scope="module")
def prediction() -> Any:
    """transformers' layer of a depth, of random weights."""
    from transformers.modeling_layers import MtpLayer
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer, Glm4MoeRMSNorm

    from tests.convert.tiny import tiny

    torch.manual_seed(0)
    layer = MtpLayer(tiny("glm 4 mixture").config, Glm4MoeDecoderLayer, Glm4MoeRMSNorm, 4).eval()
    for key, parameter in layer.named_parameters():
        parameter.data = (torch.randn(parameter.shape) * 0.2 + ("norm" in key)).bfloat16().float()
    layer.mtp_block.mlp.gate.e_score_correction_bias.copy_((torch.randn(6) * 0.2).bfloat16())
    return layer


@pytest.fixture(scope="module")
def published(prediction: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the layer, as GLM-4.5 is published."""
    folder = tmp_path_factory.mktemp("published")
    net = save_tiny("glm 4 mixture", folder)
    names = {"mtp_block.": "", "post_norm.": "shared_head.norm."}
    layer = {}
    for name, tensor in prediction.state_dict().items():
        for theirs, stored in names.items():
            name = name.replace(theirs, stored) if name.startswith(theirs) else name
        layer[f"{LAYER}.{name}"] = tensor.contiguous()
    tensors = load_file(folder / WEIGHTS_FILE)
    copies = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
    layer = as_saved(net, layer) | {
        f"{LAYER}.{ours}.weight": tensors[f"{theirs}.weight"].clone() for ours, theirs in copies.items()
    }
    save_file(tensors | layer, folder / WEIGHTS_FILE)
    assert f"{LAYER}.mlp.experts.5.up_proj.weight" in layer and f"{LAYER}.self_attn.q_norm.weight" in layer
    return folder


def test_files_return_byte_for_byte(published: Path, tmp_path: Path) -> None:
    from_huggingface(published, tmp_path / "ours")
    to_huggingface(Location(str(tmp_path / "ours")), tmp_path / "again")
    again, theirs = weights_in(tmp_path / "again"), weights_in(published)
    assert again.keys() == theirs.keys()
    assert all(again[name].dtype == tensor.dtype and again[name].equal(tensor) for name, tensor in theirs.items())
    configs = [json.loads((folder / "config.json").read_text()) for folder in (published, tmp_path / "again")]
    assert configs[0] == configs[1] and configs[0]["num_nextn_predict_layers"] == 1


def test_a_copy_is_equal_or_absent(published: Path, tmp_path: Path) -> None:
    for name in ("embed_tokens", "shared_head.head"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text((published / "config.json").read_text())
        tensors = load_file(published / WEIGHTS_FILE)
        tensors[f"{LAYER}.{name}.weight"][3, 2] += 1
        save_file(tensors, folder / WEIGHTS_FILE)
        with pytest.raises(CheckpointError, match=f"{LAYER}.{name}.weight is not equal to .*, which multi-token"):
            PretrainedWeights(folder).check_tensors()
        del tensors[f"{LAYER}.{name}.weight"]
        save_file(tensors, folder / WEIGHTS_FILE)
        PretrainedWeights(folder).check_tensors()


def test_files_of_transformers_have_no_further_layer(tmp_path: Path) -> None:
    """It keeps `num_nextn_predict_layers`, and leaves the layer out."""
    save_tiny("glm 4 mixture", tmp_path)
    given = PretrainedWeights(tmp_path)
    given.check_tensors()
    assert given.config["num_nextn_predict_layers"] == 1 and given.model.mtp_layers == 0
    model = read_model_section(Location(str(tmp_path)))
    keys = {"checkpoint__resume": f"hf:{tmp_path}"}
    compare_initial_model(config_of(settings(model, tmp_path, **keys), tmp_path))
    with pytest.raises(ConfigError, match="mtp_layers 0 there, 1 here"):
        compare_initial_model(config_of(settings(model | {"mtp_layers": 1}, tmp_path, **keys), tmp_path))


def first_step(rank: Rank, config: Any) -> tuple[Any, str, float, list[float]]:
    """Begin with the weights, and train a step: the samples, what was said, the loss and that of the depth."""
    from megascale.train.further_losses import further_metrics
    from megascale.train.resume import load_initial_state
    from megascale.train.step import train_step

    run = build_run(rank, config)
    text = load_initial_state(run, PretrainedWeights)
    parts = run.train_loader.batch(0).micro_batches
    ids = torch.cat([torch.cat([part.tokens, part.labels[-1:]]) for part in parts], 1)
    result = train_step(run, run.train_loader.batch(0))
    depths = further_metrics(config.model, config.train, 1, result.totals)["mtp"]
    run.buffers.finish_param_gather()
    if config.checkpoint.every:
        run.checkpoints.save(run.progress)
    return ids.numpy(), text, result.loss, [metrics["loss"] for metrics in depths.values()]


def test_losses_are_those_of_transformers(prediction: Any, published: Path, tmp_path: Path) -> None:
    """The main model gives its normed hidden states, and the depth its own to the shared head."""
    from tests.convert.tiny import tiny

    tree = settings(
        read_model_section(Location(str(published))), tmp_path, checkpoint__resume=f"hf:{published}", parallel__pp=2
    )
    ids, _, loss, (depth_loss,) = run_world(2, first_step, config_of(tree, tmp_path))[1]
    ids = torch.from_numpy(ids)
    net, layer, s = copy.deepcopy(tiny("glm 4 mixture")).double(), copy.deepcopy(prediction).double(), len(ids) - 1
    with torch.no_grad():
        hidden = net.model(ids[:-1].t()).last_hidden_state
        positions = torch.arange(s)[None]
        mask = torch.full((s, s), -torch.inf, dtype=torch.float64).triu(1)[None, None]
        rotary = net.model.rotary_emb(hidden, positions)
        further = layer(net.model.embed_tokens(ids[1:].t()), hidden, rotary, mask, positions, None)
        logits = net.lm_head(further)[:, :-1]  # the last token has no target
    assert depth_loss == pytest.approx(float(cross_entropy(logits.flatten(0, 1), ids[2:].t().flatten())), rel=1e-6)
    plain = net.lm_head(hidden)
    assert loss == pytest.approx(float(cross_entropy(plain.flatten(0, 1), ids[1:].t().flatten())), rel=1e-6)


def test_a_run_may_leave_the_layer_out(published: Path, tmp_path: Path) -> None:
    model = read_model_section(Location(str(published))) | {"mtp_layers": 0}
    keys = {"checkpoint__resume": f"hf:{published}", "checkpoint__every": 1, "train__precision": "fp32"}
    config = config_of(settings(model, tmp_path, **keys), tmp_path)
    assert not any("mtp" in line for line in compare_initial_model(config))
    ((_, text, _, depths),) = run_world(1, first_step, config)
    left_out = "leaves out layers of multi-token prediction (1), which model.mtp_layers would train"
    assert left_out in text and not depths
    to_huggingface(folders.find_checkpoint(Location(str(config.folder))), tmp_path / "again")
    assert not any(name.startswith(LAYER) for name in weights_in(tmp_path / "again"))
    assert json.loads((tmp_path / "again" / "config.json").read_text())["num_nextn_predict_layers"] == 0


def test_layers_of_deepseek_have_the_names_of_its_files() -> None:
    keys = LATENT | {"num_nextn_predict_layers": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
    model = read_model(keys | {"model_type": "deepseek_v3"}, "config.json")
    family = FAMILIES["deepseek_v3"]
    names = {place.name for places in tensor_map(family, model).values() for place in places}
    beside = {"enorm", "hnorm", "eh_proj", "shared_head.norm", "self_attn.kv_b_proj", "mlp.gate", "input_layernorm"}
    assert {f"{LAYER}.{module}.weight" for module in beside} <= names
    assert stored_copies(family, model).keys() == {
        f"{LAYER}.{name}.weight" for name in ("embed_tokens", "shared_head.head")
    }

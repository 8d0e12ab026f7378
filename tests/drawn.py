"""Random jobs from hypothesis: valid configurations of a model and a layout."""

from __future__ import annotations

import itertools
import math
from typing import Any

from hypothesis import strategies as st

from megascale.catalog.layers import ACTIVATIONS, BLOCKS, NORMS, ROUTER_SCORES
from megascale.catalog.optimizers import MATRIX_UNITS, OPTIMIZERS
from megascale.catalog.precisions import PRECISIONS
from megascale.catalog.recipes import RECIPES, with_scale
from megascale.catalog.schedules import SCHEDULES
from megascale.config.finding import divisors
from megascale.config.loading import load_config_tree
from megascale.config.rules import RULES, run_rules
from megascale.config.run import RunConfig
from megascale.layout.stages import looped, split_layers
from megascale.layout.topology import Coord, topology_of

Draw = Any
booleans = st.booleans()

FLAT_OPTIMIZERS = [name for name in OPTIMIZERS.names() if OPTIMIZERS[name].facts["unit_of_work"] not in MATRIX_UNITS]
"""Optimizers with equal state on all ranks; tests of owners compare those of matrices."""


@st.composite
def jobs(
    draw: Draw,
    *,
    large: bool = False,
    quick: bool = False,
    shares: bool = False,
    saves: bool = False,
    experts: bool = False,
    depths: bool = False,
    sharded: bool = False,
) -> RunConfig:
    """Draw a resolved configuration, with tensors of sizes that a formula cannot neglect. `large`: models of several GB
    per rank, for fake tensors. `quick`: without features that take torch many operators. `shares`: ranks share
    sequences where the model permits. `saves`: the MLP is in tiles where FP8 scales permit, and block inputs that are
    all that is saved are offloaded in half of the jobs. `experts`: in place of MLPs. `depths`: of multi-token
    prediction. `sharded`: weights are sharded where the layout permits.
    """
    parallel = draw(layouts(large))
    excluded = ("whole", "token_run") if quick else ("whole",)
    recipes = [name for name in RECIPES.names() if not any(RECIPES[name].facts[fact] for fact in excluded)]
    tree = {
        "name": "test",
        "parallel": parallel,
        "overlap": {axis: draw(booleans) for axis in ("tp", "pp", "dp")},
        "batch": {"micro": draw(st.sampled_from([1, 1, 2, 4] if large else [1, 1, 2, 3]))},
        "train": {"steps": 10, "precision": draw(st.sampled_from(PRECISIONS.names()))},
        "fp8": {"recipe": (recipe := draw(st.sampled_from(recipes))), "first_layers_bf16": draw(st.integers(0, 1))},
        "optimizer": {"lr": 1e-3, "name": draw(st.sampled_from(FLAT_OPTIMIZERS))},
        "data": {"mock": True},
        "checkpoint": {"every": 0},
    }
    facts = RECIPES[recipe].facts
    if facts["scaling"] == "current" and with_scale(facts, "pow2") is not facts:
        tree["fp8"]["scale"] = draw(st.sampled_from(["fp32", "pow2"]))
    count = draw(st.integers(1, 16 if large else 6))
    tree["batch"]["global"] = tree["batch"]["micro"] * parallel["dp"] * count
    tree["overlap"]["bucket_bytes"] = "auto" if large else 1 << draw(st.sampled_from([20, 22, 25]))
    widths = ([2048] if quick else [2048, 4096, 8192]) if large else None
    tree["model"] = draw(models(parallel, tree["train"]["precision"] == "fp8", widths))
    tree["model"] |= {"window": None, "vocab_size": 4000} if quick else {}
    if experts:
        inner = [512, 1536] if large else [128, 256]
        tree["model"] |= draw(mixtures(parallel["tp"], tree["model"]["num_layers"], inner))
        most = math.gcd(tree["model"]["experts"], parallel["tp"] * parallel["dp"])
        parallel |= {"sp": parallel["tp"] > 1, "ep": draw(st.sampled_from(divisors(most)))}
        if SCHEDULES[parallel["schedule"]].facts["pairs"]:  # which hide one exchange, not recomputed
            parallel["schedule"] = "interleaved_1f1b" if parallel["vpp"] > 1 else "1f1b"
        tokens = tree["batch"]["micro"] * tree["model"]["seq_length"] // parallel["tp"]
        tree["moe"] = {
            "dispatcher": draw(st.sampled_from(["all_to_all", "all_gather"])),
            "token_blocks": math.gcd(tokens, draw(st.sampled_from([1, 2, 4]))),
        }
    if depths and (parallel["tp"] == 1 or parallel["sp"]):  # otherwise ranks of tp repeat a projection
        tree["model"] |= {"mtp_layers": draw(st.integers(1, 2)), "position": "rope"}
    tree["train"] |= draw(recomputation())
    if parallel["pp"] > 2 and draw(booleans):  # ends of the network without layers
        chunks = parallel["pp"] * parallel["vpp"]
        inner = split_layers(tree["model"]["num_layers"], looped(chunks - 2, 1)).starts
        parallel["layers_per_chunk"] = [0, *(b - a for a, b in itertools.pairwise(inner)), 0]
    config = load_config_tree(tree, "drawn")
    config = with_tiles(config, draw(st.sampled_from([1, 2, 3, 4, 8])), draw(booleans)) if saves else config
    config = with_shared_sequences(config, draw(st.sampled_from(CONTEXTS))) if shares else config
    return with_sharded_weights(config, draw(st.sampled_from(["keep", "microbatch", "forward"]))) if sharded else config


def with_sharded_weights(config: RunConfig, reshard: str) -> RunConfig:
    """Return the configuration with sharded weights, released as `reshard` says or if the layout has no such way as its
    default does.
    """
    overlap, found = config.overlap.model_copy(update={"bucket_bytes": "auto"}), config
    for way in ("keep", reshard):
        parallel = config.parallel.model_copy(update={"zero": 3, "reshard": way})
        each = config.model_copy(update={"parallel": parallel, "overlap": overlap})
        found = found if any(run_rules(RULES, dict(each))) else each
    return found


CONTEXTS = [(2, "ring", 1), (4, "ring", 1), (2, "allgather", 1), (2, "ulysses", 1), (4, "ulysses", 1), (4, "usp", 2)]
"""Values of cp, cp_mode and cp_a2a_size."""


def with_shared_sequences(config: RunConfig, context: tuple[int, str, int]) -> RunConfig:
    """Return the configuration with these keys of context parallelism, or itself if they are against the rules."""
    keys = dict(zip(("cp", "cp_mode", "cp_a2a_size"), context, strict=True))
    shared = config.model_copy(update={"parallel": config.parallel.model_copy(update=keys)})
    return config if any(run_rules(RULES, dict(shared))) else shared


def with_tiles(config: RunConfig, tiles: int, offload: bool) -> RunConfig:
    """Return the configuration with tiles of the MLP, unless they are against the rules, and with offload of block
    inputs if all of them are saved.
    """
    moves = offload and config.train.recompute == "full"
    keys: dict[str, Any] = {"recompute": "none", "memory": ["full_host"]} if moves else {}
    train = config.train.model_copy(update=keys)
    tiled = config.model_copy(update={"train": train.model_copy(update={"mlp_tiles": tiles})})
    whole = config.model_copy(update={"train": train})
    return whole if any(run_rules(RULES, dict(tiled))) else tiled


@st.composite
def layouts(draw: Draw, large: bool = False) -> dict[str, Any]:
    """Draw a section [parallel] without `layers_per_chunk`."""
    tp, pp = draw(st.sampled_from([1, 2, 4, 8] if large else [1, 2, 4])), draw(st.sampled_from([1, 2, 3, 4]))
    vpp = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    facts = {name: SCHEDULES[name].facts for name in SCHEDULES.names()}
    able = [name for name in facts if (facts[name]["v"] or vpp) == vpp]
    return {
        "tp": tp, "sp": tp > 1 and draw(booleans), "pp": pp, "vpp": vpp, "schedule": draw(st.sampled_from(able)),
        "dp": draw(st.sampled_from([1, 2, 16] if large else [1, 2, 3])), "zero": draw(st.sampled_from([0, 1, 2])),
    }  # fmt: skip


QK_NORMS = ["none", "head", "full", "fixed", "tanh"]
WEIGHTED = ("post_norm", "fog")  # blocks that may have a weighted residual stream


@st.composite
def models(draw: Draw, parallel: dict[str, Any], fp8: bool, widths: list[int] | None = None) -> dict[str, Any]:
    """Draw a section [model] for a layout. `fp8`: dimensions on a rank are multiples of 128. `widths`: hidden sizes of
    large models.
    """
    position = draw(st.sampled_from(["learned", "rope"]))
    norm = draw(st.sampled_from(NORMS.names()))
    qk_norm = "none" if NORMS[norm].facts["bias"] else draw(st.sampled_from(QK_NORMS))
    tp, chunks, large = parallel["tp"], parallel["pp"] * parallel["vpp"], widths is not None
    head = 128 if fp8 else draw(st.sampled_from([64, 96, 128] if large else [32, 64, 96]))
    kv_heads = tp * draw(st.sampled_from([1, 2]))
    least = draw(st.sampled_from(widths)) if widths else 256
    heads = max(kv_heads * draw(st.sampled_from([1, 2, 3])), -(-least // head // kv_heads) * kv_heads)
    hidden = draw(st.sampled_from([heads * head, heads * head, least]))
    layers = max(chunks * (draw(st.integers(1, 4)) if large else 1) + draw(st.integers(0, 3)), 2 + fp8)
    window = draw(st.one_of(st.none(), st.integers(1, 2000 if large else 300), st.just([100, 0])))
    ffn = -(-heads * head * draw(st.sampled_from([2, 3, 4])) // (tp * 128)) if large else draw(st.integers(2, 8))
    model = {
        "num_layers": layers, "hidden_size": hidden, "num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head,
        "ffn_size": tp * 128 * ffn, "vocab_size": draw(st.integers(200, 32_000 if large else 20_000)),
        "seq_length": draw(st.sampled_from([1024, 2048, 4096, 8192] if large else [128, 256, 384, 512, 1024])),
        "window": window, "block": draw(st.sampled_from(BLOCKS.names())),
        "norm": norm, "qk_norm": qk_norm, "attention_softcap": draw(st.sampled_from([None, None, 30.0])),
        "activation": draw(st.sampled_from(ACTIVATIONS.names())),
        "position": position, "rotary_fraction": draw(st.sampled_from([1.0, 0.5])) if position == "rope" else 1.0,
        "bias": draw(booleans), "qkv_bias": draw(booleans),
        "tie_embeddings": draw(booleans), "dropout": draw(st.sampled_from([0.0, 0.0, 0.1])),
        "embedding_scale": draw(st.sampled_from([1.0, 1.0, 8.0])),
        "logit_softcap": draw(st.sampled_from([None, None, 30.0])),
    }  # fmt: skip
    return model | {"residual_tau": draw(st.sampled_from([0.0, 0.25])) if model["block"] in WEIGHTED else 0.0}


@st.composite
def mixtures(draw: Draw, tp: int, layers: int, widths: list[int]) -> dict[str, Any]:
    """Draw the keys of [model] for experts of one of `widths`."""
    shared, chosen = draw(st.sampled_from([0, 128 * tp])), draw(st.integers(1, 3))
    return {
        "experts": draw(st.sampled_from([4, 8])), "experts_per_token": chosen, "bias": draw(booleans),
        "block": draw(st.sampled_from(["serial", "sandwich", "post_norm", "fog"])), "residual_tau": 0.0,
        "shared_ffn_size": shared,
        "shared_gate": shared > 0 and draw(booleans), "dense_layers": draw(st.integers(0, min(1, layers - 1))),
        "expert_ffn_size": draw(st.sampled_from(widths)), "router_normalize": chosen > 1 and draw(booleans),
        "router_bias": draw(booleans),
        "router_score": draw(st.sampled_from(ROUTER_SCORES.names())),
    }  # fmt: skip


@st.composite
def recomputation(draw: Draw) -> dict[str, Any]:
    """Draw the keys of [train] for activation recomputation."""
    recompute = draw(st.sampled_from(["none", "selective", "full"]))
    keys: dict[str, Any] = {"recompute": recompute}
    if recompute == "selective":
        ops = st.lists(st.sampled_from(["attention", "norm", "activation"]), min_size=1, unique=True)
        keys["recompute_ops"] = draw(ops)
    return keys


def ranks_of(config: RunConfig) -> list[int]:
    """Return a rank of every pipeline stage, at different coordinates of the other axes."""
    topology = topology_of(config.parallel)
    tp, cp, dp, pp = topology.tp, topology.cp, topology.dp, topology.pp
    return [topology.rank(Coord(stage % tp, stage % cp, stage % dp, stage)) for stage in range(pp)]

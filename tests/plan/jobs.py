"""Jobs that hypothesis draws: a model, a layout, and some of its ranks, such as pass the rules of configurations."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import strategies as st

from megascale.catalog.layers import ACTIVATIONS, BLOCKS
from megascale.catalog.optimizers import OPTIMIZERS
from megascale.catalog.precisions import PRECISIONS
from megascale.catalog.recipes import RECIPES
from megascale.catalog.schedules import SCHEDULES
from megascale.config.explain import load_tree
from megascale.config.run import RunConfig
from megascale.layout.stages import split
from megascale.layout.topology import Coord, Topology

Draw = Any
booleans = st.booleans()


@st.composite
def jobs(draw: Draw) -> RunConfig:
    """A resolved configuration. Its tensors are of sizes that a formula must not neglect, and cost nothing: they are
    fake.
    """
    parallel = draw(layouts())
    tree = {
        "name": "test",
        "parallel": parallel,
        "overlap": {axis: draw(booleans) for axis in ("tp", "pp", "dp")},
        "batch": {"micro": draw(st.sampled_from([1, 1, 2, 3]))},
        "train": {"steps": 10, "precision": draw(st.sampled_from(PRECISIONS.names()))},
        "fp8": {"recipe": draw(st.sampled_from(RECIPES.names())), "bf16_first": draw(st.integers(0, 1))},
        "optimizer": {"lr": 1e-3, "name": draw(st.sampled_from(OPTIMIZERS.names()))},
        "data": {"mock": True},
        "checkpoint": {"every": 0},
    }
    tree["batch"]["global"] = tree["batch"]["micro"] * parallel["dp"] * draw(st.integers(1, 6))
    tree["overlap"]["bucket_bytes"] = 1 << draw(st.sampled_from([20, 22, 25]))
    tree["model"] = draw(models(parallel, tree["train"]["precision"] == "fp8"))
    tree["train"] |= draw(recomputation(parallel["vpp"]))
    if parallel["pp"] > 2 and draw(booleans):  # ends of the network without layers
        chunks = parallel["pp"] * parallel["vpp"]
        inner = split(tree["model"]["num_layers"], chunks - 2, 1).starts
        parallel["layers_per_chunk"] = [0, *(b - a for a, b in itertools.pairwise(inner)), 0]
    return load_tree(tree, "drawn")


@st.composite
def layouts(draw: Draw) -> dict[str, Any]:
    """A section [parallel] without layers."""
    tp, pp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 3, 4]))
    vpp = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    able = [name for name in SCHEDULES.names() if vpp == 1 or SCHEDULES[name].facts["chunks"]]
    return {
        "tp": tp, "sp": tp > 1 and draw(booleans), "pp": pp, "vpp": vpp, "schedule": draw(st.sampled_from(able)),
        "dp": draw(st.sampled_from([1, 2, 3])), "zero": draw(st.sampled_from([0, 1, 2])),
    }  # fmt: skip


@st.composite
def models(draw: Draw, parallel: dict[str, Any], eight_bits: bool) -> dict[str, Any]:
    """A section [model] for a layout; with `eight_bits` its sides are multiples of 128 on a rank."""
    tp, chunks = parallel["tp"], parallel["pp"] * parallel["vpp"]
    head = 128 if eight_bits else draw(st.sampled_from([32, 64, 96]))
    kv_heads = tp * draw(st.sampled_from([1, 2]))
    heads = max(kv_heads * draw(st.sampled_from([1, 2, 3])), -(-256 // head // kv_heads) * kv_heads)
    layers = max(chunks + draw(st.integers(0, 3)), 2 + eight_bits)
    window = draw(st.one_of(st.none(), st.integers(1, 300), st.just([100, 0])))
    return {
        "num_layers": layers, "hidden_size": heads * head, "num_heads": heads, "num_kv_heads": kv_heads,
        "ffn_size": tp * 128 * draw(st.integers(2, 8)), "vocab_size": draw(st.integers(200, 20_000)),
        "seq_length": draw(st.sampled_from([128, 256, 384, 512, 1024])), "window": window,
        "block": draw(st.sampled_from(BLOCKS.names())), "norm": draw(st.sampled_from(["layernorm", "rmsnorm"])),
        "activation": draw(st.sampled_from(ACTIVATIONS.names())),
        "position": draw(st.sampled_from(["learned", "rope"])), "bias": draw(booleans),
        "tie_embeddings": draw(booleans), "dropout": draw(st.sampled_from([0.0, 0.0, 0.1])),
    }  # fmt: skip


@st.composite
def recomputation(draw: Draw, vpp: int) -> dict[str, Any]:
    """Keys of [train]."""
    recompute = draw(st.sampled_from(["none", "selective", "full"]))
    found: dict[str, Any] = {"recompute": recompute}
    if recompute == "selective":
        ops = st.lists(st.sampled_from(["attention", "norm", "activation"]), min_size=1, unique=True)
        found["recompute_ops"] = draw(ops)
    if recompute != "none" and vpp > 1 and draw(booleans):
        found["recompute_chunks"] = [draw(st.integers(0, vpp - 1))]
    return found


def ranks_of(config: RunConfig) -> list[int]:
    """One rank of each pipeline stage, each at another place of the other axes."""
    p = config.parallel
    topology = Topology(tp=p.tp, cp=p.cp, dp=config.dp, pp=p.pp)
    return [topology.rank(Coord(stage % p.tp, 0, stage % config.dp, stage)) for stage in range(p.pp)]

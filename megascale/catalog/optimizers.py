"""Optimizers. Facts of a card:

- `unit_of_work`: the input of the update rule (`ops.optimizer`): "elements", arbitrary slices; "param_norms", norms of
  full parameters as well; "rows_and_columns", "matrix" and "low_rank", whole matrices on their owners
- `state`: fp32 state tensors by name, with their shape in dimensions: m rows, n columns, s the shorter and l the longer
  of the two, r the rank (option `rank`), M and N like m and n up to option `max_size`, else 1, h the
  option `history`, c the rank or n if that is less, d the share `density` of m n; a and b rows and columns of a block
  of at most option `block`, x and y the numbers of blocks, t and u the elements above the diagonals of a block of a and
  of b; "" is one element, and "mn/256" one for every block of 256 elements of [m, n]
- `meaning`: what the state means, by default the rule's name: on resume a rule takes over the state of another one
  with the same meaning, names and shapes; by an option's value: (option, meanings by value)
- `state_with`: further state with an option of a value, by (option, value); `uint8`: the names of tensors in 8 bits
- `kinds`: the kinds of parameters (`layout.tensors`) that the rule updates by default; AdamW updates the others
- `options`: keys of `optimizer.options` with the default values of the rule's authors; `choices`: values of a text;
  `options_of`: other defaults for parameters by patterns of names
- `weight`: the rule reads the weight; `first_moves`: whether the first gradient moves it, by direction or decay
- `width_power`: muP divides the learning rate by this power of the width: 1 for updates like Adam's, with elements of a
  fixed size that add up along a gradient of low rank, 1/2 for orthogonal ones of that size, and for those with elements
  of a fixed size in a basis of the gradient's; by an option's value: (option, powers by value)
- `gemms`: matmuls [m, k] x [k, n] of an update by m, n and k, as letters; of a Newton-Schulz step with an option
  `ns_steps`; `gemms_with`: further ones, as in `state_with`
- `temporaries`: tensors of a matrix's size at the peak of its update, a bound for memory
- `input_projection`: `module:attribute` of a function with which linear layers project the inputs that they save: from
  a layer's name, its number of inputs, the options, the step from 1 on and a tensor of the result's dtype and device to
  [inputs, rank]
- `decompositions`: their multiplications as GEMMs, every `update_gap` steps, or in every step without this option;
  `decompositions_with`: further ones, as in `state_with`
"""

from collections.abc import Mapping
from typing import Any

from megascale.core.registry import Card, Registry

REST = "adamw"  # the rule of parameters for which the chosen rule is not meant, such as norms for a rule of matrices
MATRIX_UNITS = ("rows_and_columns", "matrix", "low_rank")  # units of work that need a whole matrix on one rank
QUANTIZED_BLOCK = 256  # elements with a common scale in state of 8 bits
EXPANDED_GROUP = 128  # elements with a common range in state in FP8

TEMPORARIES = 6  # of dry runs of rules without a count of their own, 4 to 7

ALL_KINDS = ("matrix", "embedding", "head", "norm", "bias")


def with_defaults(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a card with defaults for those that it leaves out."""
    kinds = ("matrix",) if facts["unit_of_work"] in MATRIX_UNITS else ALL_KINDS
    mappings = ("options", "choices", "options_of", "state_with", "gemms", "gemms_with")
    no_more = {key: dict[str, Any]() for key in (*mappings, "decompositions", "decompositions_with")}
    defaults = {
        "meaning": "", "uint8": (), "weight": False, "first_moves": True, "width_power": 1.0,
        "temporaries": TEMPORARIES, "input_projection": "",
    }  # fmt: skip
    return {"kinds": kinds, **defaults, **no_more, **facts}


def _card(name: str, help: str, target: str, unit_of_work: str, state: dict[str, str], **facts: Any) -> Card:
    """Make a card. `target`: in `megascale.optim`."""
    facts = with_defaults({"unit_of_work": unit_of_work, "state": state, **facts})
    return Card(name, help, f"megascale.optim.{target}", facts)


_ADAM = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}

_MOMENTS = {"exp_avg": "mn", "exp_avg_sq": "mn"}

_SCALES, _POWERS = (tuple(f"{moment}_{of}" for moment in _MOMENTS) for of in ("scale", "power"))

_SVD = {"ssl": 3.0, "sss": 10.0}
"""Multiplications of a singular value decomposition, as GEMMs. These, those of eigenvectors (4.5 n^3) and those of QR
with Q (4/3 n^3, or 2 m n^2 if n is much less than m) are half of the operations in Golub and Van Loan 2013."""

_OF_GENERATORS = ("", "_avg", "_avg_sq")

_SPAM = _ADAM | {"theta": 5000.0, "reset_every": 500, "rewarmup": 150, "settle": 20}

_GALORE: dict[str, Any] = {
    "options": _ADAM | {
        "rank": 128, "update_gap": 200, "scale": 0.25, "subspace": "svd", "residual": "none", "natural": False,
        "history": 20,
    },
    "choices": {"subspace": ("svd", "online_pca", "grass_top", "grass_sample"), "residual": ("none", "fira")},
    "state_with": {
        ("subspace", "svd"): {"basis": "sr"},
        ("subspace", "online_pca"): {"basis": "sr", "basis_avg": "sr", "basis_avg_sq": "sr"},
        ("subspace", "grass_top"): {"rows": "r"},
        ("subspace", "grass_sample"): {"rows": "r"},
        ("residual", "fira"): {"residual_norm": ""},
        ("natural", True): {"history": "hrl"},
    },
    "gemms_with": {("subspace", name): {"rls": 1, "slr": 1} for name in ("svd", "online_pca")},
    "decompositions_with": {("subspace", "svd"): _SVD},
    "width_power": 0.5,
}  # fmt: skip

OPTIMIZERS = Registry(
    "optimizer",
    "megascale.optimizers",
    [
        _card(
            "adamw", "Adam with decoupled weight decay (Loshchilov and Hutter 2019)", "adamw:AdamW", "elements",
            _MOMENTS, meaning="moments",
        ),
        _card(
            "lamb", "Adam's updates scaled to the norm of each parameter, for large batches (You et al. 2020)",
            "lamb:Lamb", "param_norms", _MOMENTS, meaning="moments",
        ),
        _card(
            "muon",
            "momentum of matrices, orthogonalized by Newton-Schulz steps (Jordan et al. 2024, Liu et al. 2025)",
            "muon:muon", "matrix", {"momentum": "mn"}, meaning="momentum",
            options={
                "momentum": 0.95, "nesterov": True, "ns_steps": 5, "ns_dtype": "weights",
                "adjust_lr": "match_rms_adamw", "per_head": False,
            },
            gemms={"ssl": 1, "sls": 1, "sss": 1},
            temporaries=4,
            width_power=("adjust_lr", {"match_rms_adamw": 0.5, "original": 0.0, "none": 0.0}),
            choices={
                "ns_dtype": ("weights", "bf16", "fp32", "fp64"),
                "adjust_lr": ("match_rms_adamw", "original", "none"),
            },
        ),
        _card(
            "lion", "sign of an interpolated momentum (Chen et al. 2023)", "contrib.lion:lion", "elements",
            {"momentum": "mn"}, meaning="momentum", options={"beta1": 0.9, "beta2": 0.99},
        ),
        _card(
            "spam", "Adam with clipped spikes and a reset of its moments (Huang et al. 2025)", "contrib.spam:spam",
            "elements", _MOMENTS, options=_SPAM,
        ),
        _card(
            "spam_sparse",
            "SPAM with moments for a random part of a matrix's elements, drawn at each reset (Huang et al. 2025)",
            "contrib.spam:spam_sparse", "matrix", {"exp_avg": "d", "exp_avg_sq": "d", "resets": ""},
            options=_SPAM | {"density": 0.25},
        ),
        _card(
            "adafactor", "second moment of rows and columns, without momentum (Shazeer and Stern 2018)",
            "contrib.adafactor:adafactor", "rows_and_columns", {"row": "m", "column": "n"},
            options={"decay": 0.8, "eps1": 1e-30, "eps2": 1e-3, "clip_threshold": 1.0, "scale_parameter": True},
            weight=True, width_power=("scale_parameter", {True: 0.5, False: 1.0}),
        ),
        _card(
            "came", "Adafactor with momentum, divided by its instability (Luo et al. 2023)", "contrib.came:came",
            "rows_and_columns",
            {"exp_avg": "mn", "row": "m", "column": "n", "residual_row": "m", "residual_column": "n"},
            options={
                "beta1": 0.9, "beta2": 0.999, "beta3": 0.9999, "eps1": 1e-30, "eps2": 1e-16, "clip_threshold": 1.0,
            },
        ),
        _card(
            "adam_mini", "Adam with a second moment for each row or head (Zhang et al. 2024)",
            "contrib.adam_mini:adam_mini", "rows_and_columns", {"exp_avg": "mn", "exp_avg_sq": "m"},
            meaning="block moments", options=_ADAM | {"beta2": 0.95},
        ),
        _card(
            "sinkgd", "gradients with equal norms of rows and of columns, without state (Scetbon et al. 2025)",
            "contrib.sinkgd:sinkgd", "rows_and_columns", {}, options={"iterations": 5, "scale": 0.2},
        ),
        _card(
            "swan", "normalized and whitened gradients, without state (Ma et al. 2024)", "contrib.swan:swan", "matrix",
            {}, options={"ns_steps": 10, "scale": 0.2}, gemms={"sss": 3}, width_power=0.5,
        ),
        _card(
            "conda", "second moment in a basis of the momentum's singular vectors (Wang et al. 2025)",
            "contrib.conda:conda", "matrix", {"exp_avg": "mn", "exp_avg_sq": "sl", "basis": "ss"},
            options=_ADAM | {"update_gap": 2000, "scale": 1.0}, gemms={"sls": 3}, decompositions=_SVD, width_power=0.5,
        ),
        _card(
            "galore", "Adam in a subspace of the gradient (Zhao et al. 2024)", "contrib.galore:galore", "low_rank",
            {"exp_avg": "rl", "exp_avg_sq": "rl"}, meaning=("natural", {False: "galore", True: "natural galore"}),
            **_GALORE,
        ),
        _card(
            "grad_norm_lorp", "weight normalisation with gradients in a subspace, experimental (Huang et al. 2024)",
            "contrib.grad_norm_lorp:grad_norm_lorp", "low_rank",
            {"exp_avg": "rl", "exp_avg_sq": "rl", "length": "m", "magnitude_avg": "m", "magnitude_avg_sq": "m"},
            weight=True, meaning=("natural", {False: "grad_norm_lorp", True: "natural grad_norm_lorp"}),
            **_GALORE | {"options": _GALORE["options"] | {"eps": 1e-6, "rank": 256, "scale": 1.0}},
        ),
        _card(
            "poet", "rotations of the weight from both sides, experimental (Qiu et al. 2025)", "contrib.poet:poet",
            "matrix",
            {side + moment: size for side, size in (("left", "xt"), ("right", "yu")) for moment in _OF_GENERATORS}
            | {"merges": ""},
            options=_ADAM | {
                "eps": 1e-6, "block": 256, "merge_every": 200, "scale": 0.5, "cayley": "neumann", "neumann_terms": 3,
            },
            choices={"cayley": ("neumann", "exact")}, weight=True, width_power=0.0,
            gemms={"mna": 2, "mnb": 2, "maa": 15, "nbb": 15},
        ),
        _card(
            "compact", "Adam in a random subspace, in which layers save inputs, experimental (Shamshoum et al. 2024)",
            "contrib.compact:compact", "low_rank", {"exp_avg": "mc", "exp_avg_sq": "mc"},
            options=_ADAM | {"rank": 256, "update_gap": 50, "scale": 0.25},
            gemms={"mcn": 2, "cnc": 1, "ccc": 1 / 3, "ccm": 1}, width_power=0.5,
            input_projection="megascale.optim.contrib.compact:projection",
        ),
        _card(
            "soap", "Adam in the eigenbases of Shampoo's factors (Vyas et al. 2024)", "contrib.soap:soap", "matrix",
            _MOMENTS | {"left": "MM", "right": "NN", "left_basis": "MM", "right_basis": "NN"},
            options=_ADAM | {"beta1": 0.95, "beta2": 0.95, "update_gap": 10, "max_size": 10_000}, first_moves=False,
            gemms={"mnM": 4, "mnN": 4}, decompositions={"MMM": 2 + 4 / 3, "NNN": 2 + 4 / 3}, width_power=0.5,
        ),
        _card(
            "shampoo",
            "inverse roots of the gradient's factors, with Adam's step size (Gupta et al. 2018, Shi et al. 2023)",
            "contrib.shampoo:shampoo", "matrix",
            _MOMENTS | {"left": "MM", "right": "NN", "left_root": "MM", "right_root": "NN"},
            options=_ADAM | {"damping": 1e-6, "update_gap": 50, "max_size": 10_000}, gemms={"mnM": 2, "mnN": 2},
            decompositions={"MMM": 1 + 4.5, "NNN": 1 + 4.5}, width_power=0.5,
        ),
        _card(
            "reg", "momentum with equal norms of rows and of columns (Liu et al. 2025)", "contrib.reg:reg",
            "rows_and_columns", {"momentum": "mn"}, meaning="momentum",
            options={"momentum": 0.95, "nesterov": True, "iterations": 1, "scale": 0.2},
        ),
        _card(
            "ada_pm", "Adam-mini with momentum of low rank, or none, where that suffices (Zhang et al. 2025)",
            "contrib.ada_pm:ada_pm", "low_rank", {"exp_avg_sq": "m"}, meaning="block moments",
            options=_ADAM | {"beta2": 0.95, "momentum": "low_rank", "rank": 64},
            choices={"momentum": ("full", "low_rank", "none")},
            options_of={"*.attention.v.weight": {"momentum": "full"}, "*.attention.out.weight": {"momentum": "none"},
                        "embedding.*": {"momentum": "none"}},
            state_with={("momentum", "full"): {"exp_avg": "mn"},
                        ("momentum", "low_rank"): {"basis": "sr", "coefficients": "rl"}},
            kinds=("matrix", "embedding"),
            gemms_with={("momentum", "low_rank"): {"slr": 2, "lrs": 1, "srl": 1, "rls": 2}},
            decompositions_with={("momentum", "low_rank"): {"srr": 2}},
        ),
        _card(
            "adamw_8bit", "AdamW with moments in 8 bits (Dettmers et al. 2021)", "contrib.eight_bit:adamw_8bit",
            "matrix", _MOMENTS, options=_ADAM | {"codes": "dynamic"}, choices={"codes": ("dynamic", "e4m3")},
            state_with={
                ("codes", "dynamic"): dict.fromkeys(_SCALES, f"mn/{QUANTIZED_BLOCK}"),
                ("codes", "e4m3"): dict.fromkeys((*_SCALES, *_POWERS), f"mn/{EXPANDED_GROUP}"),
            },
            uint8=("exp_avg", "exp_avg_sq"), meaning=("codes", {"dynamic": "adamw_8bit", "e4m3": "adamw_8bit e4m3"}),
        ),
        _card(
            "galore_8bit", "GaLore with moments in 8 bits", "contrib.eight_bit:galore_8bit", "low_rank",
            {"exp_avg": "rl", "exp_avg_sq": "rl", **dict.fromkeys(_SCALES, f"rl/{QUANTIZED_BLOCK}")},
            uint8=("exp_avg", "exp_avg_sq"), meaning=("natural", {False: "galore_8bit", True: "natural galore_8bit"}),
            **_GALORE,
        ),
    ],
    synonyms={
        "adam": "adamw", "fused_adam": "adamw", "fusedadam": "adamw", "adamw_torch": "adamw",
        "adamw8bit": "adamw_8bit", "adam8bit": "adamw_8bit", "galore_adamw": "galore",
        "distributed_shampoo": "shampoo", "distributed_muon": "muon", "dist_muon": "muon", "sgd": "",
    },
)  # fmt: skip

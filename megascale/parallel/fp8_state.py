"""The amax statistics of a model's FP8 operands, from which scales come: of this step, and of earlier ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megascale.catalog.recipes import QuantizerSpec
from megascale.comm.mesh import Mesh
from megascale.comm.totals import max_over_job, sum_over_job
from megascale.config.backends import Fp8Config
from megascale.config.model import ModelConfig
from megascale.layout.blocks import block_spec, fp8_operands
from megascale.layout.chunks import fp8_weights
from megascale.layout.tensors import ParamSpec
from megascale.ops.fp8 import TORCH_KERNELS, CastRecord, Fp8Kernels
from megascale.ops.recipe import build_recipe
from megascale.parallel.dither import LayerDither, number_tokens
from megascale.parallel.fp8_phases import RecipePhase
from megascale.parallel.microbatch import MicroBatch
from megascale.parallel.stateful import GlobalTensor, TensorShard
from megascale.record.label import Label


@dataclass(frozen=True)
class CastStats:
    """Quantization statistics of one operand in a step: amax; the fractions of its elements that saturated or
    underflowed to zero; the root mean square, relative to the static scale if there is one; and the kurtosis, the mean
    of fourth powers over the squared mean of squares, 0 of zeros (SciPy's with fisher=False, about a mean of zero).
    """

    amax: float
    saturated: float
    underflow: float
    rms: float
    kurtosis: float

    @classmethod
    def of(cls, amax: float, sums: Sequence[float], unit: float) -> CastStats:
        """Return the statistics by `CastRecord.sums`. `unit`: the static scale, or 1."""
        saturated, underflowed, total, squares, fourths = sums
        kurtosis, total = total * fourths / squares**2 if squares else 0.0, max(total, 1.0)
        return cls(amax, saturated / total, underflowed / total, math.sqrt(squares / total) / unit, kurtosis)


class Fp8State:
    """Amax of every FP8 operand of the whole model in this step, and with delayed scaling the amax history.

    Every rank has entries for all operands. `fast_dgrad`: dgrad accumulates as fast as forward.
    `layers`: those with FP8 GEMMs. `weights`: specs of the FP8 weights by name. `names`: the operands. `labels`: their
    event labels.
    `history` [operands, steps]: newest first, zero where missing. `has_history`: the history has an entry.
    `token_groups`: the groups over which micro-batches have their tokens; none in hybrid data parallelism.
    `cast_shards`: casts what this rank updates of weights that are gathered as codes (`parallel.fp8_codes`).
    `keeps_weights`: operands of weights are kept for the step; not where weights are sharded.
    """

    def __init__(
        self,
        model: ModelConfig,
        fp8: Fp8Config,
        layers: range,
        mesh: Mesh,
        device: torch.device,
        kernels: Fp8Kernels = TORCH_KERNELS,
        seed: int = 0,
        later: Sequence[RecipePhase] = (),
    ) -> None:
        self._phases = [RecipePhase(0.0, build_recipe(fp8.recipe, kernels, fp8.scale)), *later]
        self.fast_dgrad = fp8.fast_dgrad
        self.recipes = [phase.recipe for phase in self._phases if phase.recipe is not None]
        self.enter(0.0)
        self.layers, self.weights = layers, fp8_weights(model, layers)
        self.labels = {
            f"layers.{index}.{operand}": Label.for_layer(index, operand)
            for index in layers
            for operand in fp8_operands(block_spec(model, index))
        }
        self.names = list(self.labels)
        self._mesh, self._seed, self._length, self._device = mesh, seed, model.seq_length, device
        self.recorder = mesh.recorder
        self._numbered: tuple[MicroBatch, Tensor] | None = None
        self.step = 0
        shared = () if mesh.topology.pooled else (mesh.cp_heads, mesh.cp_keys)
        self.token_groups = [group for group in shared if group.size > 1]
        self._gradient_std = 1 / model.hidden_size if model.unit_scaling else model.init_std**2
        self._amax = torch.zeros(len(self.names), dtype=torch.float32, device=device)
        self._sums = torch.zeros(len(self.names), 5, dtype=torch.float64, device=device)
        records = map(CastRecord, self._amax.unbind(), self._sums.unbind())
        self._records = dict(zip(self.names, records, strict=True))
        steps = fp8.history if any(recipe.uses_history for recipe in self.recipes) else 0
        self.history = torch.zeros(len(self.names), steps, dtype=torch.float32, device=device)
        self.has_history = False
        largest = torch.zeros(len(self.names), dtype=torch.float32, device=device)
        self._largest, self._largest_of = largest, dict(zip(self.names, largest.unbind(), strict=True))
        self.weight_version = 0
        self.cast_shards: Callable[[], None] | None = None
        self.keeps_weights = True
        self.collects_stats = False

    @property
    def changes(self) -> bool:
        """True if recipes follow each other: weights are then gathered in the compute dtype."""
        return len(self._phases) > 1

    def enter(self, share: float) -> None:
        """Enter the phase of a share of the run: no operand of the phase before is used any more."""
        begun = [phase for phase in self._phases if phase.start <= share]
        self.recipe = [phase.recipe for phase in begun if phase.recipe is not None][-1]
        self.quantizes = begun[-1].recipe is not None
        self.quantizes_forward = self.quantizes and begun[-1].forward

    @property
    def _keeps_history(self) -> bool:
        return self.quantizes and self.recipe.uses_history

    def uses_own_amax(self, spec: QuantizerSpec) -> bool:
        """True if scales come from the tensor being quantized; with delayed scaling only until there is a history."""
        return spec.scaling == "current" or (spec.scaling == "delayed" and not self.has_history)

    def layer_dither(self, weight: ParamSpec) -> LayerDither | None:
        """Return the random bits of a layer's operands, if any is rounded stochastically."""
        if not any(recipe.facts["stochastic"] for recipe in self.recipes):
            return None
        return LayerDither.of(weight, self._seed, self._mesh.topology, self._mesh.coord, self._device)

    def token_numbers(self, batch: MicroBatch) -> Tensor:
        """Return the global numbers of the tokens [s, b] of a micro-batch, i64."""
        if self._numbered is None or self._numbered[0] is not batch:
            self._numbered = batch, number_tokens(batch, self._length, self._device)
        return self._numbered[1]

    def static_amaxes(self, weight_std: float) -> dict[str, Tensor]:
        """Return the amaxes, f32 [], of static scales. `weight_std`: of the layer's initial weight."""
        static = [recipe.rows for recipe in self.recipes if recipe.rows["input"].spec.scaling == "static"]
        return {
            operand: self._amax.new_full((), scale * rows[operand].element.max_value)
            for rows in static[:1]
            for operand, scale in self._static_scales(weight_std).items()
        }

    def _static_scales(self, weight_std: float) -> dict[str, float]:
        """Return what brings the operands of a layer to unit size.

        Inputs of column-parallel layers come from norms, at unit size; row-parallel inputs are taken as of unit size.
        Weights start at their initial standard deviation. dY is the gradient of the logits, about 1 if losses are
        summed, times at least two weights of std init_std: the head's, and the last of the block; with unit scaling
        times the head's 1 / hidden_size.
        """
        return {"input": 1.0, "weight": weight_std, "gradient": self._gradient_std}

    def invalidate_weights(self) -> None:
        """Mark quantized weights as outdated, after an update of the weights. A collective call if their codes are
        gathered.
        """
        self.weight_version += 1
        if self.cast_shards is not None:
            self.cast_shards()

    def begin_step(self, step: int = 0, share: float = 0.0, *, collect_stats: bool) -> None:
        """Reset the step's statistics. `share`: of the run, before the step. `collect_stats`: of the step's
        casts (`take_cast_stats`).
        """
        self.step = step
        if self.changes:
            self.enter(share)
        self.collects_stats = collect_stats and bool(self.names) and self.quantizes
        self._amax.zero_()
        self._sums.zero_()
        self.invalidate_weights()  # the last step updated the weights

    def update_history(self) -> None:
        """Push the step's amax over all ranks to the history, after the last backward. A collective call. In the
        phase of another recipe the history stands still.
        """
        if not self._keeps_history:
            return
        max_over_job(self._mesh, self._amax, label="fp8 amax")
        self.history.copy_(torch.cat([self._amax.unsqueeze(1), self.history[:, :-1]], 1))
        self._set_has_history(True)

    def _set_has_history(self, has_history: bool) -> None:
        self.has_history = has_history
        if has_history:
            torch.amax(self.history, 1, out=self._largest)

    def take_cast_stats(self) -> dict[str, CastStats]:
        """Return the last step's statistics over all ranks; empty if not collected. A collective call."""
        if not self.collects_stats:
            return {}
        self.collects_stats = False
        sum_over_job(self._mesh, self._sums, label="fp8 cast stats")
        if not self._keeps_history:  # else `update_history` has reduced the amax
            max_over_job(self._mesh, self._amax, label="fp8 amax")
        stats = zip(self.names, self._amax.tolist(), self._sums.tolist(), strict=True)
        return {name: CastStats.of(amax, sums, self._unit(name)) for name, amax, sums in stats}

    def _unit(self, name: str) -> float:
        """Return the static scale of an operand, or 1."""
        layer, _, operand = name.rpartition(".")
        if self.recipe.rows[operand].spec.scaling != "static":
            return 1.0
        return self._static_scales(self.weights[f"{layer}.weight"].parts[0].std)[operand]

    def global_tensors(self) -> dict[str, GlobalTensor]:
        """Return the amax history [steps] of each operand (`fp8_history.OPERAND`), all of it on each rank; see
        `parallel.stateful.Stateful`.
        """
        rows = zip(self.names, self.history, strict=True) if self.history.numel() else ()
        shape = tuple(self.history.shape[1:])
        return {
            f"fp8_history.{name}": GlobalTensor(shape, row.dtype, [TensorShard((0,), shape, row)]) for name, row in rows
        }

    def flat_tensors(self) -> list[Tensor]:
        return [self.history]

    def begin_load(self, saved: Mapping[str, Sequence[int]], config: Mapping[str, Any]) -> dict[str, GlobalTensor]:
        """Have the first rank read the history if all of it is saved; otherwise begin a new history."""
        history = self.global_tensors()
        complete = all(tuple(saved.get(name, ())) == tensor.shape for name, tensor in history.items())
        self.has_history = bool(history) and complete
        self.history.zero_()
        return history if self.has_history and self._mesh.rank == 0 else {}

    def end_load(self) -> None:
        if self.has_history:  # zero but on the first rank
            sum_over_job(self._mesh, self.history)
            self.end_restore()

    def end_restore(self) -> None:
        begins = self.recipes[0].uses_history  # otherwise the phase that has a history may be yet to come
        self._set_has_history(bool(self.history.numel()) and (begins or bool(self.history.any())))

    def record(self, name: str) -> CastRecord | None:
        """Return the statistics to which a cast of this operand adds in this step; None if nobody reads them."""
        if not self.collects_stats and not self._keeps_history:
            return None
        record = self._records[name]
        return record if self.collects_stats else record._replace(sums=None)

    def history_amax(self, name: str) -> Tensor:
        """The maximum, f32 [], of an operand's amax history."""
        return self._largest_of[name]

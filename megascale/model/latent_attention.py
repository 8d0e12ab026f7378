"""Multi-head latent attention (MLA; DeepSeek-AI 2024), as `layout.parts.latent_projections` describes it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megascale.comm.group import single_rank_group
from megascale.model.attention import Attention
from megascale.model.modules import LayerContext, Linear, Norm
from megascale.parallel.microbatch import MicroBatch
from megascale.parallel.recompute import Recomputation, recompute_in_backward
from megascale.parallel.segments import Steps
from megascale.parallel.tensor import column_parallel_linear, column_parallel_steps, shared_by_heads
from megascale.parallel.tp_overlap import TensorParallel
from megascale.record.label import Label


class LatentAttention(Attention):
    """Self-attention from latents of a rank's own tokens, which column-parallel layers project to its heads. Rotated
    elements of q and k are apart from the others: [q of all heads, q_rope of all heads], and one k_rope for all heads.
    """

    def _add_projections(self, context: LayerContext) -> None:
        name, m = self._place, context.model
        self.down, self.q_up, self.kv_up = (Linear(context, f"{name}.{part}") for part in ("down", "q_up", "kv_up"))
        eps = m.latent_norm_eps
        self.q_latent_norm = Norm(context, f"{name}.q_latent_norm", eps) if m.q_lora_rank else None
        self.kv_latent_norm = Norm(context, f"{name}.kv_latent_norm", eps)
        self._widths = [m.q_lora_rank, m.kv_lora_rank, m.rope_head_dim]
        self._alone = TensorParallel(single_rank_group("tp"))

    def attend(self, x_sbh: Tensor, batch: MicroBatch, recompute_input: Recomputation | None) -> Steps[Tensor]:
        projected = yield from self._project(x_sbh, batch, recompute_input)
        if not self._recompute:
            return self._attend_in_place(projected, batch)
        widths = [part.shape[-1] for part in projected]
        return recompute_in_backward(
            lambda joined: self._attend_in_place(joined.split(widths, -1), batch), torch.cat(projected, -1)
        )

    def _project(
        self, x_sbh: Tensor, batch: MicroBatch, recompute_input: Recomputation | None
    ) -> Steps[tuple[Tensor, Tensor, Tensor]]:
        """Map x to this rank's q and k, v [s, b, ...], and to the rotated part of k [s, b, rope_head_dim]."""
        latents = column_parallel_linear(x_sbh, self.down.params, self._alone, recompute_input=recompute_input)
        q_latent, kv_latent, k_rope = latents.split(self._widths, -1)
        if self.q_latent_norm is None:
            layers, label = [self.q_up.params.of(batch)], Label.for_layer(self._index, "q up")
            (q,) = yield from column_parallel_steps(x_sbh, layers, self._tp, label, recompute_input)
        else:
            (q,) = yield from self._project_up(q_latent, batch, self.q_latent_norm, self.q_up, "q up")
        (kv,) = yield from self._project_up(kv_latent, batch, self.kv_latent_norm, self.kv_up, "kv up")
        return q, kv, shared_by_heads(k_rope, self._tp, Label.for_layer(self._index, "shared key"))

    def _project_up(
        self, latent: Tensor, batch: MicroBatch, norm: Norm, up: Linear, part: str
    ) -> Steps[tuple[Tensor, ...]]:
        label, again = Label.for_layer(self._index, part), norm.recompute_norm(latent)
        return column_parallel_steps(norm(latent), [up.params.of(batch)], self._tp, label, again)

    def rope_and_attend(
        self,
        parts: Sequence[Tensor],
        angles: tuple[Tensor, Tensor] | None,
        keep: Tensor | None,
        batch: MicroBatch | None = None,
    ) -> Tensor:
        """Put q, k and v together from `parts`, as `_project` returns them, and attend. v is padded to the width of q
        and k: fused kernels have one width, and of two torch's for CPUs would hold all scores in memory.
        """
        assert angles is not None, "latent attention has rotary embeddings"
        m, n = self._model, self._heads
        (q, kv, k_rope), v_dim = parts, m.value_head_dim
        q, q_rope = (t.unflatten(-1, (n, -1)) for t in q.split([n * m.head_dim, n * m.rope_head_dim], -1))
        k, v = (t.unflatten(-1, (n, -1)) for t in kv.split([n * m.head_dim, n * v_dim], -1))
        q_rope, k_rope = self._rotate(q_rope, n, *angles), self._rotate(k_rope.unsqueeze(2), 1, *angles)
        q, k = torch.cat((q, q_rope), -1), torch.cat((k, k_rope.expand(-1, -1, n, -1)), -1)
        return super().rope_and_attend([q, k, F.pad(v, (0, m.qk_head_dim - v_dim))], None, keep, batch)

    def _join(self, out_sbnd: Tensor) -> Tensor:
        return super()._join(out_sbnd[..., : self._model.value_head_dim])


def softmax_attention(context: LayerContext, index: int) -> Attention:
    """The softmax attention of layer number `index`, latent with `kv_lora_rank`."""
    return (LatentAttention if context.model.kv_lora_rank else Attention)(context, index)

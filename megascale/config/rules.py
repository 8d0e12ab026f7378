"""All rules between keys of a configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from megascale.config import (
    backend_rules,
    data_rules,
    exclusions,
    file_rules,
    loss_rules,
    memory_rules,
    model_rules,
    parallel_rules,
    site_rules,
    time_rules,
    train_rules,
)
from megascale.config.backends import Fp8Config
from megascale.config.exclusions import Exclusions
from megascale.config.finding import Finding

Rule = Callable[..., Iterable[Finding]]
"""A rule takes sections by their names, and yields a finding for every mistake."""

RULES: tuple[Rule, ...] = (
    model_rules.attention_heads,
    exclusions.NO_LEARNED_POSITIONS, model_rules.positions,
    exclusions.NO_ROPE, model_rules.rope, model_rules.rope_scaling,
    model_rules.qk_norm, model_rules.RESIDUAL_TAU, model_rules.UNIT_SCALING,
    exclusions.NO_LATENT, exclusions.LATENT, model_rules.latent_attention,
    model_rules.attention_by_layer, model_rules.NO_SCORES, model_rules.LINEAR_ATTENTION,
    exclusions.ATTENTION_SINKS, exclusions.SPARSE_ATTENTION, model_rules.sparse_attention,
    exclusions.NO_EXPERTS, exclusions.EXPERTS, model_rules.experts, model_rules.new_router,
    parallel_rules.expert_parallel,
    exclusions.NO_BALANCED_EXPERTS, exclusions.NO_BALANCE_LOSS, exclusions.NO_BALANCE_GROUP, exclusions.NO_BALANCE_BIAS,
    parallel_rules.balance_group, parallel_rules.token_blocks,
    exclusions.NO_MTP, exclusions.MTP, model_rules.multi_token_prediction,
    exclusions.NO_EXITS, exclusions.EXITS, model_rules.early_exits,
    loss_rules.NO_TEACHER, loss_rules.TEACHER, loss_rules.WHOLE_SAMPLES, loss_rules.objectives, loss_rules.distillation,
    parallel_rules.tensor_parallel, parallel_rules.domino,
    parallel_rules.pipeline,
    backend_rules.fp8_shapes, backend_rules.fp8_scale, backend_rules.fp8_schedule,
    parallel_rules.schedule, parallel_rules.paired_experts, exclusions.VOCABULARY,
    exclusions.SKIPS, parallel_rules.skipped_stages, parallel_rules.released_weights, parallel_rules.SHARDED_WEIGHTS,
    parallel_rules.hybrid_sharding,
    parallel_rules.coded_gradients,
    train_rules.recomputed_operations,
    memory_rules.LAYER_POLICIES, memory_rules.layer_policies, memory_rules.saved_tensors_folder, memory_rules.NO_CHOICE,
    train_rules.batch_size, train_rules.batch_rampup, train_rules.counts,
    train_rules.noise_scale,
    data_rules.skipped_samples, data_rules.changed_weights, data_rules.document_order,
    exclusions.MOCK_DATA, exclusions.NO_DOCUMENTS, data_rules.end_of_document,
    data_rules.padded_experts,
    exclusions.NOT_DECOMPOSED, data_rules.decomposed_documents,
    exclusions.NO_POLICY, data_rules.data_policy,
    exclusions.SAMPLE_WEIGHTS, exclusions.EXPERT_PARALLEL,
    parallel_rules.cp_modes, parallel_rules.cp_sequence, parallel_rules.cp_heads, parallel_rules.cp_fp8,
    parallel_rules.cp_combinations, parallel_rules.cp_sharding,
    exclusions.WHOLE_SEQUENCES, data_rules.chunk_sizes, data_rules.chunk_schedule, exclusions.CHUNKS,
    exclusions.NOT_HYBRID, parallel_rules.hybrid_tokens, parallel_rules.hybrid_fp8,
    exclusions.HYBRID,
    backend_rules.tile_tokens, backend_rules.tile_scales, train_rules.tile_recomputation,
    train_rules.learning_rate, exclusions.NO_TAIL, exclusions.CONSTANT_RATE,
    exclusions.NO_AVERAGE, exclusions.NO_EMA, exclusions.NO_LAWA, exclusions.NO_HISTORY, exclusions.BLOCK_SCALES,
    train_rules.optimizer_groups,
    train_rules.frozen_parameters, exclusions.FROZEN,
    exclusions.TIED_HEAD,
    train_rules.compensated_weights, exclusions.LAMB, exclusions.COMPENSATED,
    exclusions.NO_OFFLOAD, train_rules.OFFLOAD, train_rules.offloaded_state,
    train_rules.PROJECTED_INPUTS, train_rules.projected_inputs,
    exclusions.ZCLIP, exclusions.SKIPPED_STEPS,
    backend_rules.supported_backends,
    exclusions.NO_HOST_READER,
    file_rules.data_source, file_rules.data_files, file_rules.data_samples, loss_rules.teacher_file,
    file_rules.resume,
    exclusions.NO_CHECKPOINTS, exclusions.NO_COPIES, file_rules.memory_folder,
    file_rules.file_system,
    exclusions.NO_PRUNING,
    time_rules.nccl_ctas, exclusions.NO_PIPELINE,
    time_rules.timeouts, time_rules.fault_times, time_rules.rebuilt_stages, time_rules.REBUILT_STAGES,
    time_rules.injected_faults, time_rules.layout_ranks,
    site_rules.meeting, site_rules.outer_steps, site_rules.SEVERAL_SITES, site_rules.NOTHING_LEFT_OVER,
)  # fmt: skip
"""In the order of their findings. A rule runs if its sections are tables, whatever else is wrong."""

DATA_RULES = (
    file_rules.data_source, file_rules.data_files, file_rules.data_samples, loss_rules.teacher_file, train_rules.counts
)  # fmt: skip
"""Rules of a run on its data, which a plan does not have."""


class InvalidValueError(Exception):
    """A rule has read a key without a valid value, and judges nothing."""


@cache
def sections_of(rule: Rule) -> frozenset[str]:
    """Return the names of the sections that a rule reads: of a function, its parameters."""
    return frozenset(rule.sections if isinstance(rule, Exclusions) else inspect.signature(rule).parameters)


def run_rules(rules: Iterable[Rule], sections: Mapping[str, Any]) -> Iterator[Finding]:
    """Run the rules whose sections are all there; functions of `[fp8]` for all recipes of the run."""
    fp8 = sections.get("fp8")
    later = [{**sections, "fp8": section} for _, section in fp8.phases[1:]] if isinstance(fp8, Fp8Config) else []
    for rule in rules:
        if (names := sections_of(rule)) <= sections.keys():
            phases = [sections, *(later if "fp8" in names and not isinstance(rule, Exclusions) else ())]
            try:
                found = [each for phase in phases for each in rule(**{name: phase[name] for name in names})]
            except InvalidValueError:
                continue
            yield from dict.fromkeys(found)

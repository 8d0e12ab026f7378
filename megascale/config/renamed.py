"""Former names of settings and values: for hints, and to read what runs of earlier versions have stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megascale.config.exclusions import without_other_modes

RENAMED_KEYS = {
    "observe.dir": "output_dir", "launch.timeout_s": "comm.timeout_s", "parallel.cp_ulysses": "parallel.cp_a2a_size",
    "data.chunk_tokens": "data.sequence_chunk_tokens", "data.keep_chunks": "data.sequence_chunks_saved",
    "data.bucket_samples": "data.decompose_bucket_samples", "data.cycle": "data.decompose_cycle",
    "data.min_piece": "data.decompose_min_length", "data.boundary_loss": "data.eod_mask_loss",
    "data.mask": "data.attention_mask", "data.weights": "data.blend_schedule", "data.policy": "data.blend_policy",
    "data.policy_every": "data.blend_policy_every", "data.order": "data.document_order_file",
    "data.skip": "data.skip_samples",
    "train.check_replicas": "train.check_replicas_every", "train.average": "train.weight_average",
    "train.average_decay": "train.weight_average_decay", "train.average_every": "train.weight_average_every",
    "train.average_count": "train.weight_average_count", "optimizer.master": "optimizer.master_weights",
    "checkpoint.memory_every": "checkpoint.in_memory_every", "checkpoint.memory_dir": "checkpoint.in_memory_dir",
    "checkpoint.file_bytes": "checkpoint.max_file_bytes", "checkpoint.patience_s": "checkpoint.retry_timeout_s",
    "observe.record": "observe.record_events", "observe.ledger": "observe.record_events",
    "observe.events": "observe.store_events", "observe.store": "observe.event_store",
    "fault.flap_s": "fault.link_recovery_s", "fault.evidence_s": "fault.diagnosis_timeout_s",
    "fault.exclude_s": "fault.node_exclusion_s", "fault.memory_failures": "fault.oom_failures",
    "fault.network_alerts": "fault.network_faults", "fp8.bf16_first": "fp8.first_layers_bf16",
    "fp8.bf16_last": "fp8.last_layers_bf16",
}  # fmt: skip

_BY_LAYER = "write train.memory, a policy for each layer"

REMOVED_KEYS = {
    "train.recompute_chunks": _BY_LAYER, "train.recompute_model_chunks": _BY_LAYER,
    "train.activation_offload": "remove it: block inputs stay on the device by default",
    "train.distill_temperature": "remove it: the temperature is 1",
    "optimizer.offload_subgroup": "remove it: the size of sub-groups is fixed",
}  # fmt: skip
"""Settings that are gone, with hints. Stored runs go on without them: results are the same."""

RENAMED_VALUES: dict[tuple[str, str | bool], tuple[str, Any]] = {
    ("train.activation_offload", True): ("train.memory", ["full_host"]),
    ("parallel.cp_mode", "hybrid"): ("parallel.hybrid_dp", True),
    ("data.boundary_loss", False): ("data.eod_mask_loss", True),
    ("data.boundary_loss", True): ("data.eod_mask_loss", False),
    ("optimizer.master", "compensated"): ("optimizer.master_weights", "bf16_compensated"),
    ("fp8.recipe", "mu_unit"): ("fp8.recipe", "static"),
    ("backends.linear", "compile"): ("backends.linear", "triton"),
}
"""Settings with another value now, by key and value."""


def renamed(key: str, value: Any) -> tuple[str, Any]:
    """Return the present key and value of a setting."""
    changed = RENAMED_VALUES.get((key, value)) if isinstance(value, str | bool) else None
    return changed or (RENAMED_KEYS.get(key, key), value)


def with_present_names(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration that this or an earlier version has stored, with the present names and values."""
    found: dict[str, Any] = {}
    for name, values in tree.items():
        if not isinstance(values, dict):
            found[name] = values
            continue
        found.setdefault(name, {})
        for key, value in values.items():
            present, present_value = renamed(f"{name}.{key}", value)
            if present in REMOVED_KEYS:
                continue
            section, _, last = present.rpartition(".")
            (found.setdefault(section, {}) if section else found)[last] = present_value
    if (train := found.get("train", {})).get("memory") == ["full_host"]:
        train["recompute"] = "none"  # which was "full", with the former switch of the policy
    return without_other_modes(found)

"""Checks that a resumed run goes on in the order of samples in which it was: what it has read stays as it is.

Every check raises ConfigError on every rank. `saved`: sections of the configuration in the checkpoint; `samples`: those
that the saved run has read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from megascale.config.data import DataConfig
from megascale.config.decomposition import CYCLE, MIN_PIECE
from megascale.core.errors import ConfigError, Problem
from megascale.data.mix.blend import blend_parts, same_order
from megascale.data.mix.skipped_ranges import Ranges, below, read_before


def check_skipped(data: DataConfig, saved: Ranges, samples: int) -> None:
    """Check `data.skip_samples` is as it was: another range among those samples would move all samples after them."""
    end = read_before(samples, saved)
    if below(end, saved) != below(end, data.skip_samples):
        message = f"differs from the checkpoint's {saved} below {end}, up to where the run has read its samples"
        hint = "keep its ranges, and leave out later samples only, or resume from an earlier checkpoint"
        raise ConfigError([Problem("data", "data.skip_samples", message, hint)])


def check_turns(
    data: DataConfig, batch: int, seq_length: int, saved: Mapping[str, Mapping[str, Any]], samples: int
) -> None:
    """Check that decomposed documents have the order of lengths that they had: in another, all samples would move.
    `batch`: samples of a step.
    """
    before = saved.get("data", {})
    if not samples or data.packing != "decompose" or before.get("packing") != "decompose":
        return
    turn, now = before["decompose_bucket_samples"] or saved["batch"]["global"], data.decompose_bucket_samples or batch
    if turn != now:
        message = f"has turns of {now} samples of a length, and the checkpoint of {turn}"
        key = "data.decompose_bucket_samples"
        raise ConfigError([Problem("data", key, message, f"{key} = {turn}")])
    defaults = {"decompose_min_length": min(MIN_PIECE, seq_length), "curriculum": None, "decompose_cycle": CYCLE}
    for key, default in defaults.items():
        if (had := before[key] or default) != (found := getattr(data, key) or default):
            message = f"is {found}, and the order of the samples that the run has read is of {had}"
            raise ConfigError([Problem("data", f"data.{key}", message, f"data.{key} = {json.dumps(had)}")])


def check_weights(data: DataConfig, saved: Mapping[str, Any], samples: int) -> None:
    """Check that the blend's weights are as they were: with others, the run would read samples of its datasets again,
    and leave others out.
    """
    end = read_before(samples, data.skip_samples)
    before, now = (
        blend_parts([weight for weight, _ in source], changes) if isinstance(source, list) else [(0, [1.0])]
        for source, changes in (
            (saved.get("train"), saved.get("blend_schedule", [])),
            (data.train, data.blend_schedule),
        )
    )
    if not same_order(before, now, end, data.packing == "decompose"):
        weights = [part for part in before if part[0] < end]
        message = f"has other weights below {end}, up to where the run has read its samples, than {weights}"
        schedule = [[start, list(part)] for start, part in weights]
        hint = f"data.blend_schedule = {schedule}, and new weights from {end} on"
        raise ConfigError([Problem("data", "data.blend_schedule", message, hint)])


def check_policy(data: DataConfig, saved: Mapping[str, Any]) -> None:
    """Check that a run whose data policy has changed the weights has one: by the configured weights it would read
    samples of its datasets again, and leave others out.
    """
    if (before := saved.get("blend_policy")) and not data.blend_policy:
        message = f"is not set, and {before} has changed the weights of the blend so far"
        hint = "data.blend_policy = fixed keeps its last weights"
        raise ConfigError([Problem("data", "data.blend_policy", message, hint)])

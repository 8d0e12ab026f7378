"""Changes of the configuration by which a run that resumes reads its samples in another order. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megascale.config.data import dataset_prefixes


def order_changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield a warning for each change that moves samples between the configurations of a checkpoint and of a run that
    resumes from it.
    """
    if now["data"]["mock"] or saved.get("data", {}).get("mock"):
        return
    before, after = _order_keys(saved, now), _order_keys(now, saved)
    for key in before:
        if before[key] != after[key]:
            what = f"{key} was {before[key]} and is {after[key]}: this changes the order of samples"
            yield f"{what}, and the run reads samples again and leaves others out"


def _order_keys(config: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """The values in `config` that decide the order of samples, by key. Keys of later versions are as in `other`."""
    data, others = config.get("data", {}), other.get("data", {})
    found = {f"data.{key}": data.get(key, others.get(key)) for key in ("packing", "document_order_file")}
    for section, key in (("train", "seed"), ("model", "seq_length")):
        found[f"{section}.{key}"] = config.get(section, {}).get(key, other.get(section, {}).get(key))
    train, valid = data.get("split") or others["split"]
    found["data.split"] = None if data.get("valid") else train / (train + valid)
    prefixes = dataset_prefixes(data.get("train"))
    if sorted(prefixes) == sorted(dataset_prefixes(others.get("train"))):  # else a moved dataset, or a further one
        found["data.train"] = prefixes
    return found

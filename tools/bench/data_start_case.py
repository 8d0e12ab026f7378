"""One start of one system, in a process of its own: opens the training data and reads the samples of the first step.

Prints a JSON object: seconds and CPU seconds of the imports, of the start and of the first step's samples, and the
largest resident size. With `--processes N` the process forks N others after its imports, which start at the same time.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Read = Callable[[int], Any]
"""Reads a sample by its number."""

VOCABULARY = 50_304
SEED = 1234


def open_megascale(options: argparse.Namespace) -> Callable[[], Read]:
    """Import megascale; return the function that opens the data, as rank 0 does."""
    from megascale.config.loading import load_config_tree
    from megascale.data.mix.mixture import Mixture
    from megascale.train.run_splits import mixture_spec

    model = {"num_layers": 1, "hidden_size": 64, "num_heads": 1}
    model |= {"vocab_size": VOCABULARY, "seq_length": options.seq_length}
    tree = {"name": "bench", "model": model, "batch": {"global": options.batch}}
    tree |= {"train": {"steps": options.steps, "seed": SEED}, "optimizer": {"lr": 1e-3}, "data": {"mock": True}}
    config = load_config_tree(tree, "bench")
    blend = [(1.0, prefix) for prefix in prefixes(options)]
    data = config.data.model_copy(
        update={"mock": False, "train": blend, "cache": str(options.cache), "split": [1.0, 0.0]}
    )

    def start() -> Read:
        spec = mixture_spec(config.model_copy(update={"data": data}), "train")
        mixture = Mixture(spec, options.steps * options.batch)
        mixture.check()
        return mixture.__getitem__

    return start


def open_megatron(options: argparse.Namespace) -> Callable[[], Read]:
    """Import megatron-core; return the function that builds its blended dataset, as rank 0 does."""
    import logging
    import warnings

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    import torch.distributed as dist
    from megatron.core.datasets import helpers
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    assert helpers.build_blending_indices

    class Tokenizer:
        eod, pad, vocab_size, unique_identifiers = 0, -1, VOCABULARY, {"bench": 1}

    names, again = prefixes(options), options.again
    blend = (names, [1.0] * len(names) if len(names) > 1 else None)
    config = GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=options.seq_length,
        blend_per_split=[blend, None, None],  # fast_cache_load refuses a blend that it would have to split
        path_to_cache=str(options.cache),
        num_dataset_builder_threads=2,
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        fast_cache_load=options.fast and again,
        defer_npy_index_mmap=options.fast and again,
    )

    def start() -> Read:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        sizes = [options.steps * options.batch, 0, 0]
        train, _, _ = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()
        return train.__getitem__

    return start


SYSTEMS = {"megascale": open_megascale, "megatron-core": open_megatron}


def prefixes(options: argparse.Namespace) -> list[str]:
    """The prefixes of all datasets in the folder."""
    return sorted(str(path.with_suffix("")) for path in options.data.glob("*.idx"))


def measure(start: Callable[[], Read], batch: int) -> dict[str, float]:
    """Start, and read the first step's samples; return seconds, CPU seconds and MiB."""
    begun = time.perf_counter(), time.process_time()
    read = start()
    opened = time.perf_counter(), time.process_time()
    for number in range(batch):
        read(number)
    done = time.perf_counter(), time.process_time()
    return {
        "start_s": opened[0] - begun[0],
        "start_cpu_s": opened[1] - begun[1],
        "first_step_s": done[0] - opened[0],
        "first_step_cpu_s": done[1] - opened[1],
        "rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def measure_forked(start: Callable[[], Read], batch: int, processes: int) -> dict[str, float]:
    """Start in forked processes at the same time; return the seconds until all are ready, and their private MiB."""
    begun, pipes = time.perf_counter(), []
    for _ in range(processes):
        reader, writer = os.pipe()
        if os.fork() == 0:
            result = measure(start, batch)
            text = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
            private = sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Private_"))
            os.write(
                writer,
                json.dumps({"cpu": result["start_cpu_s"] + result["first_step_cpu_s"], "private": private}).encode(),
            )
            os._exit(0)
        os.close(writer)
        pipes.append(reader)
    results = [json.loads(os.read(reader, 1 << 16)) for reader in pipes]
    return {
        "all_ready_s": time.perf_counter() - begun,
        "cpu_s": sum(result["cpu"] for result in results),
        "private_mib": sum(result["private"] for result in results) / 1024 / processes,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system", choices=list(SYSTEMS))
    parser.add_argument("data", type=Path)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--seq-length", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--samples", type=int, help="samples to read (those of a batch)")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--again", action="store_true", help="the cache exists")
    parser.add_argument("--fast", action="store_true", help="megatron-core's fast_cache_load, defer_npy_index_mmap")
    options = parser.parse_args()
    samples = options.samples or options.batch
    begun = time.perf_counter(), time.process_time()
    start = SYSTEMS[options.system](options)
    imports = {"import_s": time.perf_counter() - begun[0], "import_cpu_s": time.process_time() - begun[1]}
    if options.processes > 1:
        print(json.dumps(imports | measure_forked(start, samples, options.processes)))
    else:
        print(json.dumps(imports | measure(start, samples)))


if __name__ == "__main__":
    main()

"""Soft labels of a teacher, a checkpoint, for the samples of a run (`data.mix.teacher`): its likeliest tokens."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from megascale.checkpoint.format import manifest
from megascale.config.loading import check_rules
from megascale.config.run import RunConfig
from megascale.config.teacher_file import TeacherHeader, needed_labels
from megascale.core.errors import CheckpointError
from megascale.core.rank import Rank
from megascale.core.storage import Location
from megascale.data.mix.teacher import LabelRows, write_labels
from megascale.device import detect_device
from megascale.ops.cross_entropy import soft_cap
from megascale.train.build import build_mesh, build_rank_run
from megascale.train.resume import OpenWeights, load_initial_state
from megascale.train.run import Run
from megascale.train.stop import StopRequest

ALONE = Rank(0, 1, 0, "localhost")


def write_teacher(config: RunConfig, checkpoint: Location, path: Path, open_weights: OpenWeights) -> TeacherHeader:
    """Write the soft labels by a checkpoint's model for the samples of a run's steps with a teacher. `config`: of the
    run, resolved.

    Raises: CheckpointError for a teacher of another vocabulary, ConfigError for one that cannot run, OSError
    """
    with tempfile.TemporaryDirectory() as folder:
        teacher, device = teacher_config(config, checkpoint, folder), detect_device()
        header = needed_labels(config.model, config.batch, config.train, config.sites)
        run = build_rank_run(teacher, build_mesh(teacher, ALONE, device), device, StopRequest(), init_weights=False)
        load_initial_state(run, open_weights)
        run.buffers.finish_param_gather()
        write_labels(path, header, islice(_labels(run, header), header.samples))
    return header


def teacher_config(config: RunConfig, checkpoint: Location, folder: str) -> RunConfig:
    """Return the configuration of a teacher on one process: its model, with the data and the batch of a run.

    Raises: CheckpointError, ConfigError
    """
    saved, train = manifest.read(checkpoint).facts.config, config.train
    whole = {"sequence_chunk_tokens": None, "sequence_chunks_saved": 1, "reader": "rank"}
    precision = "bf16" if train.quantizes else train.precision
    found = RunConfig.model_validate(
        {
            "name": "teacher",
            "output_dir": folder,
            "model": saved["model"] | {"seq_length": config.model.seq_length},
            "moe": saved.get("moe", {}),
            "parallel": {"dp": 1},
            "batch": config.batch.model_copy(update={"rampup": None}),
            "train": {"steps": train.steps, "seed": train.seed, "precision": precision},
            "optimizer": {"lr": 1.0},
            "data": config.data.model_copy(update=whole),
            "checkpoint": {"every": 0, "resume": str(checkpoint)},
        }
    ).resolve(1)
    if (size := found.model.vocab_size) != config.model.vocab_size:
        what = f"{checkpoint} has a vocabulary of {size} tokens, and the run one of {config.model.vocab_size}"
        raise CheckpointError(what, hint="a teacher with the tokenizer of the run's data")
    check_rules(found, str(checkpoint))
    return found


@torch.no_grad()
def _labels(run: Run, header: TeacherHeader) -> Iterator[tuple[np.ndarray, LabelRows]]:
    """Yield the ids and the soft labels of each sample, in order."""
    (stage,), total = run.stages, run.config.batch.total
    head, stage.head = stage.head, None  # a stage without a head returns the hidden states
    assert head is not None, "a single stage has the head"
    weight, cap = head.weight[: header.vocab_size], run.config.model.logit_softcap
    for start in range(0, header.samples, total):
        for part in run.train_loader.batch(start).micro_batches:
            x_sbh = head.norm(stage(None, part).activation)
            part.release(forward_only=True)
            assert part.tokens is not None and part.labels is not None, "a single stage reads both"
            ids = torch.cat([part.tokens, part.labels[-1:]]).cpu().numpy()
            for row in range(ids.shape[1]):  # the logits of one sample at a time
                logits = x_sbh[:, row] @ weight.t()
                wide = soft_cap(logits.to(torch.promote_types(logits.dtype, torch.float32)), cap)
                log_probs, tokens = wide.log_softmax(-1).topk(header.top_k)
                yield ids[:, row], (tokens.int().cpu().numpy(), log_probs.float().cpu().numpy())

"""Soft labels of a teacher, a checkpoint, for the samples of a run (`data.mix.teacher`): its likeliest tokens."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from megascale.checkpoint.format import manifest
from megascale.config.batch_rampup import teacher_samples
from megascale.config.loading import check_rules
from megascale.config.model import ModelConfig
from megascale.config.moe import MoeConfig
from megascale.config.parallel import ParallelConfig
from megascale.config.run import RunConfig
from megascale.config.teacher_file import TeacherHeader
from megascale.config.train import CheckpointConfig, OptimizerConfig, TrainConfig
from megascale.core.errors import CheckpointError
from megascale.core.rank import Rank
from megascale.core.storage import Location
from megascale.data.mix.teacher import LabelRows, write_labels
from megascale.data.read.identity import run_identities
from megascale.device import detect_device
from megascale.layout.parameters import describe_parameters
from megascale.ops.cross_entropy import soft_cap
from megascale.train.build import build_mesh, build_rank_run
from megascale.train.resume import OpenWeights, load_initial_state
from megascale.train.run import Run
from megascale.train.stop import StopRequest

ALONE = Rank(0, 1, 0, "localhost")


def write_teacher(
    config: RunConfig, checkpoint: Location, path: Path, top_k: int, samples: int | None,
    open_weights: OpenWeights,
) -> TeacherHeader:  # fmt: skip
    """Write the soft labels by a checkpoint's model for the first samples of a run: by default for those of its steps
    with a teacher, or of all steps. `config`: of the run, resolved.

    Raises: CheckpointError for a teacher of another vocabulary, ConfigError for one that cannot run, OSError
    """
    with tempfile.TemporaryDirectory() as folder:
        teacher, own = teacher_config(config, checkpoint, folder), config.model
        samples = samples or teacher_samples(config.batch, config.train, config.sites.count) or config.samples
        about = f"{describe_parameters(teacher.model)}, {checkpoint}"
        data = run_identities(config.data.model_copy(update={"valid": None}))
        header = TeacherHeader(own.vocab_size, own.seq_length, top_k, samples, config.train.seed, data, about)
        device = detect_device()
        run = build_rank_run(teacher, build_mesh(teacher, ALONE, device), device, StopRequest(), init_weights=False)
        load_initial_state(run, open_weights)
        run.buffers.finish_param_gather()
        write_labels(path, header, _labels(run, header))
    return header


def teacher_config(config: RunConfig, checkpoint: Location, folder: str) -> RunConfig:
    """Return the configuration of a teacher on one process: its model, with the data and the batch of a run.

    Raises: CheckpointError, ConfigError
    """
    saved = manifest.read(checkpoint).facts.config
    model, own = ModelConfig.model_validate(saved["model"]), config.model
    if model.vocab_size != own.vocab_size:
        what = f"{checkpoint} has a vocabulary of {model.vocab_size} tokens, and the run one of {own.vocab_size}"
        raise CheckpointError(what, hint="a teacher with the tokenizer of the run's data")
    precision = "bf16" if config.train.quantizes else config.train.precision
    whole = {"sequence_chunk_tokens": None, "sequence_chunks_saved": 1, "reader": "rank"}
    found = RunConfig(
        name="teacher",
        output_dir=folder,
        model=model.model_copy(update={"seq_length": own.seq_length}),
        moe=MoeConfig.model_validate(saved.get("moe", {})),
        parallel=ParallelConfig(dp=1),
        batch=config.batch.model_copy(update={"rampup": None}),
        train=TrainConfig(steps=config.train.steps, seed=config.train.seed, precision=precision),
        optimizer=OptimizerConfig(lr=1.0),
        data=config.data.model_copy(update=whole),
        checkpoint=CheckpointConfig(every=0, resume=str(checkpoint)),
    ).resolve(1)
    check_rules(found, str(checkpoint))
    return found


@torch.no_grad()
def _labels(run: Run, header: TeacherHeader) -> Iterator[tuple[np.ndarray, LabelRows]]:
    """Yield the ids and the soft labels of each sample, in order."""
    (stage,), total = run.stages, run.config.batch.total
    head, stage.head = stage.head, None  # a stage without a head returns the hidden states
    assert head is not None, "a single stage has the head"
    weight, cap = head.weight[: header.vocab_size], run.config.model.logit_softcap
    left = header.samples
    for start in range(0, header.samples, total):
        for part in run.train_loader.batch(start).micro_batches:
            x_sbh = head.norm(stage(None, part).activation)
            part.release(forward_only=True)
            assert part.tokens is not None and part.labels is not None, "a single stage reads both"
            ids = torch.cat([part.tokens, part.labels[-1:]]).cpu().numpy()
            for row in range(min(ids.shape[1], left)):  # the logits of one sample at a time
                logits = x_sbh[:, row] @ weight.t()
                wide = soft_cap(logits.to(torch.promote_types(logits.dtype, torch.float32)), cap)
                log_probs, tokens = wide.log_softmax(-1).topk(header.top_k)
                yield ids[:, row], LabelRows(tokens.int().cpu().numpy(), log_probs.float().cpu().numpy())
            left -= ids.shape[1]

"""The answer of `megascale check`: a line about the run, and the memory of the rank and of the host that need most."""

from __future__ import annotations

from typing import Any

from megascale.cli.check_data import RANKS_OF_HOST, data_summary
from megascale.config.run import RunConfig
from megascale.config.section import AUTO
from megascale.core.units import format_bytes, format_count
from megascale.data.mix.batch_shape import BatchShape
from megascale.layout.chunks import fp8_layers, token_ranks
from megascale.layout.parameters import describe_parameters
from megascale.layout.topology import topology_of
from megascale.plan.account.attended import describe_documents
from megascale.plan.account.memory import JobMemory
from megascale.plan.account.site_traffic import describe_sites
from megascale.plan.account.state_bytes import host_state_bytes
from megascale.train.run_splits import mixture_spec


def memory_facts(config: RunConfig) -> dict[str, Any]:
    """Return the peak memory of the rank with the highest peak, and of its host, in bytes by kind.

    `reader_bytes`: of the reader of the job's first host, on which are up to RANKS_OF_HOST ranks, 0 without one;
    `host_activation_bytes`: of the rank with most saved tensors there; `host_optimizer_bytes`: of the rank with most
    optimizer state there, 0 without `optimizer.offload`.
    """
    job, reader = JobMemory(config), 0
    rank = job.fullest()
    if config.data.reader == "host":
        from megascale.data.host_reader.reader_memory import reader_shape  # imports numpy

        ranks = range(min(config.world_size, RANKS_OF_HOST))
        shape = BatchShape(config.batch.total, config.batch.micro, config.dp)
        splits = 2 if config.train.eval_every else 1
        ranks_of = topology_of(config.parallel), token_ranks(config.model, config.parallel), ranks
        reader = reader_shape(mixture_spec(config, "train"), shape, *ranks_of, splits).bytes
    stages = range(config.parallel.pp if config.train.activation_offload or config.train.memory else 0)
    state = {"weights": rank.parameters, "gradients": rank.gradients, "optimizer": rank.optimizer}
    return {
        "state_bytes": {**state, "total": sum(state.values())},
        "activation_bytes": {"total": rank.activations},
        "transient_bytes": rank.transient,
        "total_bytes": rank.total,
        "reader_bytes": reader,
        "host_activation_bytes": max((job.moved_bytes(stage, "host") for stage in stages), default=0),
        "host_optimizer_bytes": host_state_bytes(config),
    }


def describe_recipes(config: RunConfig) -> str:
    """Name the layers with FP8 GEMMs, and the recipes that follow each other."""
    layers, last = fp8_layers(config.model, config.train, config.fp8), config.model.total_layers - 1
    changes = "".join(f", {change} from {start:.0%} on" for start, change in config.fp8.schedule)
    return f"layers {layers.start} to {layers.stop - 1} of 0 to {last} run {config.fp8.recipe}{changes}"


def summary(config: RunConfig) -> str:
    """Describe the run in one line, and list the peak memory of the rank with the highest peak, by kind."""
    p, m, memory = config.parallel, config.model, memory_facts(config)
    cp = f" x cp {p.cp} {'hybrid_dp' if p.hybrid_dp else p.cp_mode}" if p.cp > 1 else ""
    vpp = f" (vpp {p.vpp})" if p.vpp > 1 else ""
    ep = f" (ep {p.ep})" if p.ep > 1 else ""
    layout = f"tp {p.tp}{' sp' if p.sp else ''}{cp} x pp {p.pp}{vpp} x dp {config.dp}{ep}"
    tokens, whole = config.sites.count * config.batch.total * m.seq_length, config.samples * m.seq_length
    rampup = " after the ramp-up" if config.batch.rampup else ""
    documents = f"{text}\n" if (text := describe_documents(config.data)) else ""
    rank = JobMemory(config).fullest()
    lines = [f"  {kind:<12}{format_bytes(size):>10}" for kind, size in {**vars(rank), "total": rank.total}.items()]
    if config.train.memory == AUTO:
        lines.append("train.memory = auto: the planner chooses at the start; here every layer keeps what it saves")
    if config.train.quantizes:
        lines.append(describe_recipes(config))
    if text := describe_sites(config):
        lines.append(text)
    if size := memory["host_activation_bytes"]:
        lines.append(f"saved tensors of a rank in host memory {format_bytes(size)}")
    if size := memory["host_optimizer_bytes"]:
        lines.append(f"optimizer state of a rank in host memory {format_bytes(size)}")
    if size := memory["reader_bytes"]:
        lines.append(f"memory of a host's reader {format_bytes(size)}")
    return "\n".join(
        [
            f"{config.name}: {describe_parameters(m)}, {layout} = {config.world_size} processes, "
            f"{config.num_microbatches} micro-batches of {config.batch.micro}, "
            f"{format_count(tokens)} tokens per step{rampup}, "
            f"{format_count(whole)} in {config.train.steps} steps: no mistakes found",
            f"{data_summary(config)}{documents}memory of the fullest rank",
            *lines,
        ]
    )

"""The answer of `megascale check`: a line about the run, and the memory of the rank and of the host that need most."""

from __future__ import annotations

from typing import Any

from megascale.cli.check_data import data_summary, reader_bytes
from megascale.config.run import RunConfig
from megascale.config.section import AUTO
from megascale.core.units import format_bytes, format_count
from megascale.layout.chunks import fp8_layers
from megascale.layout.parameters import describe_parameters
from megascale.plan.account.attended import describe_documents
from megascale.plan.account.memory import JobMemory
from megascale.plan.account.site_traffic import describe_sites
from megascale.plan.account.state_bytes import host_state_bytes


def memory_facts(config: RunConfig) -> dict[str, Any]:
    """Return the peak memory of the rank with the highest peak, and of its host, in bytes by kind.

    `host_activation_bytes`: of the rank with most saved tensors there; `host_optimizer_bytes`: of the rank with most
    optimizer state there, 0 without `optimizer.offload`.
    """
    job = JobMemory(config)
    rank = job.fullest()
    state = {"weights": rank.parameters, "gradients": rank.gradients, "optimizer": rank.optimizer}
    return {
        "state_bytes": {**state, "total": sum(state.values())},
        "activation_bytes": {"total": rank.activations},
        "transient_bytes": rank.transient,
        "total_bytes": rank.total,
        "reader_bytes": reader_bytes(config),
        "host_activation_bytes": job.most_moved("host"),
        "host_optimizer_bytes": host_state_bytes(config),
    }


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
        layers, fp8 = fp8_layers(m, config.train, config.fp8), config.fp8
        changes = "".join(f", {change} from {start:.0%} on" for start, change in fp8.schedule)
        which = f"layers {layers.start} to {layers.stop - 1} of 0 to {m.total_layers - 1}"
        lines.append(f"{which} run {fp8.recipe}{changes}")
    if text := describe_sites(config.sites, m, config.train):
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

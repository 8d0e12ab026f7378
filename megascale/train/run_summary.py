"""The first lines of a run for people: model, layout, memory, backends, MFU's peak and folder."""

from __future__ import annotations

import torch

from megascale.catalog.accelerators import Peak
from megascale.core.units import format_bytes, format_flops
from megascale.layout.parameters import describe_parameters
from megascale.layout.recompute_policy import describe_policies
from megascale.ops.advice import slow_backend_hint
from megascale.ops.select import selected_backends
from megascale.plan.account.memory import JobMemory
from megascale.train.op_context import op_context
from megascale.train.run import Run


def run_summary(run: Run, peak: Peak | None) -> str:
    """Describe the run in a few lines: model, layout, memory, backends, MFU's peak and folder."""
    config, p, m = run.config, run.config.parallel, run.config.model
    policies = config.train.memory
    threads = f", {torch.get_num_threads()} threads each" if run.device.is_cpu else ""
    memory = JobMemory(config).rank(run.mesh.coord.pp)
    name = f"{config.name}: {describe_parameters(m)} in {config.train.precision}"
    tensor, pipeline = f"tp {p.tp}{' with sp' if p.sp else ''}", f"pp {p.pp} (vpp {p.vpp}, {p.schedule})"
    if p.cp > 1 or p.hybrid_dp:
        tensor += f" x cp {p.cp} ({'hybrid_dp' if p.hybrid_dp else p.cp_mode})"
    ep = f", ep {p.ep}" if p.ep > 1 else ""
    inner = f" over {p.dp_shard}" if p.dp_shard else ""
    shape = f"{tensor} x {pipeline} x dp {config.dp} (zero {p.zero}{inner}{ep})"
    step = f"a step is {config.batch.total} x {m.seq_length} tokens, {config.num_microbatches} micro-batches a rank"
    if config.num_chunks > 1:
        step += f", chunks of {config.row_tokens} tokens with K = {config.data.sequence_chunks_saved}"
    elif p.hybrid_dp:
        step += f" or more, planned of up to {config.row_tokens} tokens"
    context = op_context(config, run.device)
    backends = ", ".join(f"{operation} {backend}" for operation, backend in selected_backends(context).items())
    peak_text = f"{format_flops(peak.flops)} a rank ({peak.source})" if peak else ""
    lines = [
        f"{name}, {shape} = {config.world_size} ranks{threads}",
        f"{step}; rank {run.mesh.rank} needs {format_bytes(memory.total)}: parameters, gradients and optimizer "
        f"{format_bytes(memory.parameters + memory.gradients + memory.optimizer)}, activations "
        f"{format_bytes(memory.activations)}, transient {format_bytes(memory.transient)} at most",
        *([f"train.memory: {describe_policies(policies, m.total_layers)}"] if isinstance(policies, list) else []),
        f"backends: {backends}{', blocks compiled' if config.train.compile else ''}",
        *([f"WARNING: {hint}"] if (hint := slow_backend_hint(context)) else []),
        f"MFU is measured against {peak_text}" if peak else f"MFU n/a: the peak of {run.device.name!r} is not known",
        f"writing to {config.folder}",
    ]
    return "\n".join(lines)

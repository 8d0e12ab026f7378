"""One rank of megascale on the tokens and initial weights of the peers' scripts: the training loop of `megascale train`
with metrics and TensorBoard every step.

Steps are timed like the peers' from barrier to barrier, with the CPU seconds of this process, but here the loop's work
between steps is included. The output is a line per step and a JSON object at the end.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
import time
from dataclasses import fields
from functools import lru_cache

import torch
from peer_systems import TOKEN_SEED, Size
from peer_weights import FAMILIES, fill

from megascale.comm import init
from megascale.comm.totals import device_barrier
from megascale.config.run import RunConfig
from megascale.core.rank import Rank, rank_from_environment
from megascale.data.mix.loader import BatchShape, Loader
from megascale.data.mix.samples import Sample, SampleSource
from megascale.device import detect_device
from megascale.train.build import build_mesh, build_rank_run
from megascale.train.loop import train
from megascale.train.peak_flops import find_peak_flops
from megascale.train.reporter import Reporter, open_writers
from megascale.train.run import Run, StepResult
from megascale.train.stop import StopRequest


class PeerSamples(SampleSource):
    """Tokens of the peers' scripts: sample i is row i % batch of step i // batch."""

    def __init__(self, size: Size, steps: int, seed: int) -> None:
        self._rows = size.global_batch
        self._shape = (size.global_batch, size.seq + 1)
        self._vocab, self._seed = size.vocab, seed
        self._step = lru_cache(maxsize=1)(self._draw)

    def __getitem__(self, index: int) -> Sample:
        ids = self._step(index // self._rows)[index % self._rows].numpy()
        return Sample(ids)

    def _draw(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self._seed + step)
        return torch.randint(self._vocab, self._shape, generator=generator)


class Stopwatch(Reporter):
    """The run's reporter, extended with the time between the starts of successive steps."""

    def watch(self, run: Run) -> Stopwatch:
        self._run = run
        self.losses: list[float] = []
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self._last: tuple[float, float] | None = None
        return self

    def start_step(self) -> None:
        self.lap()
        super().start_step()

    def end_step(self, result: StepResult) -> None:
        super().end_step(result)
        self.losses.append(result.loss)

    def lap(self) -> None:
        """Record the time of the step that has ended, if any."""
        device_barrier(self._run.mesh, self._run.device.torch_device)
        now = time.perf_counter(), time.process_time()
        if self._last is not None:
            self.wall.append(now[0] - self._last[0])
            self.cpu.append(now[1] - self._last[1])
        self._last = time.perf_counter(), time.process_time()


def main() -> None:
    """Train and report."""
    options = arguments()
    rank = rank_from_environment() or Rank(0, 1, 0, "localhost")
    device = detect_device(rank.local_rank, allow_gpu=False)
    init.init_distributed(rank, device)
    size = Size(**{field.name: getattr(options, field.name) for field in fields(Size)})
    with tempfile.TemporaryDirectory() as folder:
        config = configuration(options, size, folder)
        run = build_rank_run(config, build_mesh(config, rank, device), device, StopRequest().install_handlers())
        use_peers_weights(run, options.weights, options.weight_seed)
        samples = PeerSamples(size, options.steps, options.token_seed)
        shape = BatchShape(size.global_batch, size.micro_batch, config.dp)
        dropout, seed = config.model.dropout, config.train.seed
        run.train_loader = Loader(
            samples, shape, run.mesh.coord.dp, dropout=dropout, seed=seed, device=device.torch_device
        )
        config.folder.mkdir()
        writers = (
            open_writers(config.folder, config.train.steps, 0, tensorboard=config.observe.tensorboard)
            if rank.rank == 0
            else []
        )
        watch = Stopwatch(config, device, find_peak_flops(run), writers, run.mesh.recorder).watch(run)
        train(run, watch)
        watch.lap()
        watch.close()
    show(run, watch, options.warmup)
    init.shutdown_distributed()


def arguments() -> argparse.Namespace:
    """Parse the subset of the peers' options that megascale supports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(Size):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default)
    for name in ("tp", "pp", "vp", "dp", "ep"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--sp", action="store_true")
    parser.add_argument("--zero3", action="store_true")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=2, help="untimed steps first")
    parser.add_argument("--token-seed", type=int, default=TOKEN_SEED)
    parser.add_argument(
        "--weights", choices=FAMILIES, default="torch-native", help="system that draws the initial weights"
    )
    parser.add_argument("--weight-seed", type=int, default=TOKEN_SEED)
    return parser.parse_args()


def configuration(options: argparse.Namespace, size: Size, folder: str) -> RunConfig:
    """Build the configuration of the peers' scripts: a Llama, Adam without weight decay at a constant learning rate;
    with experts the loss of megatron-core's script that balances micro-batches.
    """
    experts = {"experts": size.experts, "experts_per_token": size.topk} if size.experts else {}
    balance = {"balance": "group", "balance_group": size.micro_batch, "balance_weight": 1e-2} if size.experts else {}
    tree = {
        "name": "peer",
        "model": {
            "num_layers": size.layers, "hidden_size": size.hidden, "num_heads": size.heads, "ffn_size": size.ffn,
            "vocab_size": size.vocab, "seq_length": size.seq, "norm": "rmsnorm", "activation": "swiglu",
            "position": "rope", "bias": False, "tie_embeddings": False,
            **experts,
        },
        "parallel": {
            "tp": options.tp, "sp": options.sp, "pp": options.pp, "vpp": options.vp, "dp": options.dp,
            "ep": options.ep, **({"zero": 3} if options.zero3 else {}),
        },
        "moe": balance,
        "batch": {"micro": size.micro_batch, "global": size.global_batch},
        "train": {"steps": options.steps, "precision": "fp32", "log_every": 1},
        "optimizer": {"lr": 1e-3, "decay": "constant", "weight_decay": 0.0, "clip_norm": 1.0},
        "data": {"mock": True},
        "checkpoint": {"every": 0},
        "output_dir": folder,
    }  # fmt: skip
    return RunConfig.model_validate(tree).resolve(None)


def use_peers_weights(run: Run, family: str, seed: int) -> None:
    """Replace the initial weights. In fp32 the weights are also the master weights."""
    draw = FAMILIES[family](run.config.model, seed)
    mesh = run.mesh
    for bucket in run.buffers.buckets:
        with bucket.whole_weights():
            for slot in bucket.layout.slots:
                fill(bucket.parameters[slot.parameter.name].data, slot.parameter, mesh.topology, mesh.coord, draw)


def show(run: Run, watch: Stopwatch, warmup: int) -> None:
    """Print every step, and the medians over timed steps with the CPU seconds summed over ranks."""
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    ranks = run.mesh.world.control.all_gather((watch.cpu, rss), "measurements")
    if run.mesh.rank != 0:
        return
    for step, (loss, wall) in enumerate(zip(watch.losses, watch.wall, strict=True), 1):
        print(f"step {step:3d}  loss {loss:.6f}  {1e3 * wall:.1f} ms")
    cpu = [sum(step) for step in zip(*(cpu for cpu, _ in ranks), strict=True)]
    tokens = run.config.batch.total * run.config.model.seq_length
    summary = {
        "tokens_per_s": round(tokens / statistics.median(watch.wall[warmup:]), 1),
        "cpu_ms_per_step": round(1e3 * statistics.median(cpu[warmup:]), 1),
        "rss_mb_max": round(max(rss for _, rss in ranks)),
        "torch": torch.__version__,
    }
    print(json.dumps(summary), flush=True)


if __name__ == "__main__":
    main()

"""Systems of the comparison, and the command to train the same model on the same tokens in a layout.

The peers' scripts are in a separate folder; megascale's, `megascale_peer.py`, is next to this file. All scripts use the
same option names for the sizes.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megascale.core.network import LOOPBACK, listen

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.append(str(HERE.parent))  # of results.py, which writes the pages

SEED = 1234
TOKEN_SEED = SEED * 100003
"""Seed of a step's tokens, before the step is added. The megatron-core script derives TOKEN_SEED from SEED; the other
scripts take TOKEN_SEED itself, to draw the same tokens.
"""


@dataclass(frozen=True)
class Size:
    """Sizes of the model, a Llama with a SwiGLU of width `ffn`, and of the batch. With `experts` a layer has so many in
    place of its MLP, each of width `ffn`, and routes a token to `topk` of them.
    """

    hidden: int = 256
    layers: int = 8
    heads: int = 8
    ffn: int = 768
    seq: int = 256
    vocab: int = 8192
    micro_batch: int = 2
    global_batch: int = 16
    experts: int = 0
    topk: int = 2

    def arguments(self) -> list[str]:
        """Return the options of a script; those of experts only with experts, which few scripts have."""
        given = {key: value for key, value in asdict(self).items() if self.experts or key not in ("experts", "topk")}
        return [word for key, value in given.items() for word in (f"--{key.replace('_', '-')}", str(value))]


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism. `name`: 1, or space-separated words such as tp2, sp, pp2, vpp2, dp2, ep2, zero3, with
    which systems shard what they can over dp.
    """

    name: str
    tp: int = 1
    sp: bool = False
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    ep: int = 1
    zero3: bool = False

    @property
    def world(self) -> int:
        """Number of processes."""
        return self.tp * self.pp * self.dp

    @staticmethod
    def parse(name: str) -> Layout:
        """Parse a layout's name. Raises: ValueError"""
        degrees: dict[str, int] = {}
        for word in [] if name == "1" else name.split() or [name]:
            match = re.fullmatch(r"(tp|pp|vpp|dp|ep)([1-9]\d*)|(sp|zero3)", word)
            if not match:
                raise ValueError(f"{name!r} is not a layout: give 1, or words such as 'tp2 sp pp2 vpp2 dp2'")
            degrees[match[1] or match[3]] = int(match[2] or 1)
        sp, zero3 = (bool(degrees.pop(word, 0)) for word in ("sp", "zero3"))
        return Layout(name, sp=sp, zero3=zero3, **degrees)

    def arguments(self) -> list[str]:
        words = ["--tp", str(self.tp), "--pp", str(self.pp), "--vp", str(self.vpp), "--dp", str(self.dp)]
        return [*words, *(["--sp"] if self.sp else []), *(["--ep", str(self.ep)] if self.ep > 1 else [])]


@dataclass(frozen=True)
class System:
    """A system or a variant. `weights`: family of its initial weights. `only_dp`: a variant for layouts with data
    parallelism only. `shards`: it shards weights, or at least optimizer state. `launches`: the script starts its own
    processes.
    """

    name: str
    script: str
    weights: str
    extra: tuple[str, ...] = ()
    only_dp: bool = False
    shards: bool = False
    launches: bool = True

    def trains_in(self, layout: Layout) -> bool:
        """Return True if a comparison in the layout has this system."""
        return (layout.dp > 1 or not self.only_dp) and (self.shards or not layout.zero3)


_NATIVE = ("--seed", str(TOKEN_SEED), "--data-batches", "0")
# the same network without weight decay, and the median of all timed steps, not only of steps without other load
_MEGATRON = tuple(f"--pos rope --norm RMSNorm --swiglu --no-bias --untie --wd 0 --max-foreign -1 --seed {SEED}".split())

OURS = "megascale"

SYSTEMS = {
    system.name: system
    for system in (
        System(
            OURS, "megascale_peer.py", "torch-native", ("--token-seed", str(TOKEN_SEED)), shards=True, launches=False
        ),
        System("torch-native", "torch_native_cpu.py", "torch-native", (*_NATIVE, "--dp-mode", "ddp")),
        System(
            "torch-native-fsdp2", "torch_native_cpu.py", "torch-native", (*_NATIVE, "--dp-mode", "fsdp"), True, True
        ),
        System("megatron-core", "megatron_cpu.py", "megatron-core", _MEGATRON, launches=False),
        System(
            "megatron-core-zero1",
            "megatron_cpu.py",
            "megatron-core",
            (*_MEGATRON, "--zero", "--overlap-grad-reduce", "--overlap-param-gather"),
            only_dp=True,
            shards=True,
            launches=False,
        ),
        System("torchtitan", "torchtitan_cpu.py", "torch-native", (*_NATIVE, "--dp-mode", "fsdp"), shards=True),
    )
}


def with_experts() -> dict[str, System]:
    """Return the systems that train experts, from the weights of megatron-core's script."""
    weights = "megatron-core"
    start = "--weights", weights, "--weight-seed", str(SEED)
    ours = replace(SYSTEMS[OURS], weights=weights, extra=(*SYSTEMS[OURS].extra, *start))
    return {OURS: ours} | {name: system for name, system in SYSTEMS.items() if system.weights == weights}


@dataclass(frozen=True)
class Task:
    """Task of every system. `steps` includes the `warmup` steps, which come first and are not timed."""

    size: Size
    steps: int
    warmup: int


@dataclass(frozen=True)
class Cluster:
    """A testbed with one rank per host (`lab.testbed`): the links' bandwidth in tc's notation, and the cores of a
    host, None for unlimited.
    """

    rate: str
    cores: float | None = None

    def around(self, launcher: Sequence[str], script: Sequence[str], world: int) -> list[str]:
        """Return the command to run `launcher` and `script` on all hosts, with the host's rendezvous arguments."""
        places = '--nnodes "$HOSTS" --node-rank "$HOST_INDEX" --master-addr "$FIRST_HOST"'
        start = f"exec {shlex.join(launcher)} --nproc-per-node 1 {places} {shlex.join(script)}"
        cores = ["--cores", str(self.cores)] if self.cores else []
        testbed = [sys.executable, str(ROOT / "tools" / "lab"), "testbed", "--hosts", str(world), "--rate", self.rate]
        return [*testbed, *cores, "--timeout", "3600", "--exec", "--", "sh", "-c", start]


def command(
    system: System, layout: Layout, task: Task, python: Path, peers: Path, cluster: Cluster | None = None
) -> list[str]:
    """Return the command to run a system in a layout. It prints a line per step and a JSON object at the end."""
    steps = ["--steps", str(task.steps), "--warmup", str(task.warmup)]
    script = [str((HERE if system.name == OURS else peers) / system.script), *task.size.arguments()]
    zero3 = ["--zero3"] if layout.zero3 and system.name == OURS else []
    script += [*layout.arguments(), *zero3, *steps, *system.extra]
    launcher = [str(python), "-W", "ignore", "-m", "torch.distributed.run"]
    if cluster is not None and layout.world > 1:
        return cluster.around(launcher, script, layout.world)
    if system.launches:
        return [str(python), "-W", "ignore", *script]
    return [*launcher, *on_this_host(layout.world), *script]


def on_this_host(world: int) -> list[str]:
    """Return torchrun's arguments for ranks of one host. Not --standalone: that rendezvous unpickles what any user of
    the host may write into its store.
    """
    with listen(LOOPBACK) as listener:
        port = listener.getsockname()[1]
    place = ["--rdzv-backend", "static", "--master-addr", LOOPBACK, "--master-port", str(port)]
    return ["--nnodes", "1", *place, "--local-addr", LOOPBACK, "--nproc-per-node", str(world)]


def check_command(family: str, task: Task, python: Path) -> list[str]:
    """Return the command of the reference run: megascale on one process from the initial weights of `family`."""
    ours = command(SYSTEMS[OURS], Layout("1"), Task(task.size, COMPARED, 0), python, HERE)
    return [*ours, "--weights", family, "--weight-seed", str(SEED if family == "megatron-core" else TOKEN_SEED)]


COMPARED = 2
"""Number of steps with compared losses: the second loss depends on gradients and an update."""

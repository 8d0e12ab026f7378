"""A fake GPU: torch's spare device type under fake tensors, with a watch on copies between host and device.

The device type stays the process's accelerator, so tests open it in a new process (`tests.worlds`). Fake tensors have
shapes and devices but no data: they raise where a shape depends on data, or where operands are on two devices.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import megascale
from megascale.comm import symmetric_memory
from megascale.config.run import RunConfig
from megascale.layout.chunks import shares_embedding, stages_of
from megascale.layout.topology import topology_of
from megascale.ops.rope import rope_table
from megascale.plan.dryrun.fake_mesh import FakeDevice, fake_mesh
from megascale.record.recorder import Recorder, Timer
from megascale.train.build import build_rank_run
from megascale.train.run import Run
from megascale.train.stop import StopRequest

NAME = "gpu"

PACKAGE = f"{Path(megascale.__file__).parent}/"

aten = torch.ops.aten

COPIES = (aten.copy_.default, aten._to_copy.default)

ONCE = ("rope_table",)
"""Functions with a cached result: their copies to the device happen once in a run."""


class Crossing(AssertionError):
    """A copy between host and device for which the host waits."""


class Moment:
    """A mark, and the number of queries."""

    asked = 0


class LateTimer:
    """A device that has passed a mark at the second query."""

    synchronous = False

    def mark(self) -> Any:
        return Moment()

    def seconds(self, mark: Any) -> float | None:
        if isinstance(mark, float):
            return mark
        mark.asked += 1
        return 0.0 if mark.asked > 1 else None

    def completion_mark(self, works: Sequence[Any], channel: Any) -> Any:
        return Moment()


class FakeGPU(FakeDevice):
    """A fake H100."""

    name = "fake GPU"
    capability = (9, 0)

    def timer(self) -> Timer:
        return LateTimer()


class Generator(torch.Generator):
    """A generator on the host: the device type has none, and `Watch` draws without a generator."""

    def __new__(cls, device: Any = None) -> Generator:
        return super().__new__(cls, "cpu")

    @property
    def device(self) -> torch.device:
        return torch.device(NAME, 0)


class Watch(TorchDispatchMode):
    """Records copies between host and device, except asynchronous copies from pinned memory, and replaces operators
    that fake tensors of this device type lack. Reads return zero.

    Nothing is raised here, because an exception in a backward on this device type ends the process.
    """

    def __init__(self) -> None:
        super().__init__()
        self.crossings: list[str] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled, and torch's guard against it takes time in each call

    def note(self, what: str) -> None:
        """Record a copy and the trainer's line."""
        frames = [frame for frame in traceback.extract_stack() if frame.filename.startswith(PACKAGE)]
        if any(frame.name in ONCE for frame in frames):
            return
        line = f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else "outside of the trainer"
        self.crossings.append(f"{what}  {line}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is aten._local_scalar_dense.default and args[0].device.type == NAME:
            self.note("read: a number")
            return 0
        if func is aten._fused_sgd_.default:  # has no shape function; changes its arguments in place
            return None
        if func is aten._pin_memory.default:
            pinned = args[0].clone()
            pinned.is_in_pinned_memory = True
            return pinned
        if func is aten.rand.generator:
            func = aten.rand.default
            del kwargs["generator"]
        out = func(*args, **kwargs)
        self._look(func, args, kwargs, out)
        return out

    def _look(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        if not any(t.device.type == NAME for t in (*given, *made)):
            return
        # a host scalar is an argument of a kernel, not a copy, unless the operation is a copy
        here = [t for t in given if t.device.type == "cpu" and (t.dim() or func in COPIES)]
        without_wait = kwargs.get("non_blocking", len(args) > 2 and args[2])
        if any(t.device.type == "cpu" for t in made):
            self.note(f"read: {func}")
        elif here and not (func in COPIES and without_wait and all(hasattr(t, "is_in_pinned_memory") for t in here)):
            self.note(f"copy: {func}")


class WatchCalls(TorchFunctionMode):
    """Records copies in Python calls that CUDA and this device type treat differently."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and args[0].device.type == NAME:
            target, index, *value = args
            args = (target, self._index(index), *value)
            self._assigned(*args)
        if func in (torch.tensor, torch.as_tensor) and torch.device(kwargs.get("device") or "cpu").type == NAME:
            self._watch.note(f"copy: {func.__name__}")
            made = func(*args, **kwargs | {"device": "cpu"})
            return torch.zeros(made.shape, dtype=made.dtype, device=kwargs["device"])
        return func(*args, **kwargs)

    def _index(self, index: Any) -> Any:
        """Turn lists into host tensors, as torch does."""
        if isinstance(index, tuple):
            return tuple(map(self._index, index))
        return torch.tensor(index) if isinstance(index, list) else index

    def _assigned(self, target: Tensor, index: Any, value: Any = None) -> None:
        """Record the copy of `tensor[index] = number`: CUDA turns the number into a host tensor
        (python_variable_indexing.cpp), and copies it for a single element or an index tensor; else it fills.
        """
        if value is None or isinstance(value, Tensor):
            return
        parts = index if isinstance(index, tuple) else (index,)
        if any(isinstance(part, Tensor) for part in parts) or target[index].dim() == 0:
            self._watch.note("copy: a number that is assigned")


@contextmanager
def watched() -> Iterator[Watch]:
    """Run a `with` block under fake tensors and `Watch`. Raises: Crossing at the end of the block, for any copies."""
    rope_table.cache_clear()
    try:
        with (
            patch("torch.Generator", Generator),
            patch.object(symmetric_memory, "can_map_peers", lambda group, device: False),
            FakeTensorMode(allow_non_fake_inputs=True),
            Watch() as watch,
            WatchCalls(watch),
        ):
            yield watch
    finally:
        rope_table.cache_clear()
    if watch.crossings:
        raise Crossing("\n".join(watch.crossings))


def open_device() -> torch.device:
    """Name the device type, once in a process, and return the device."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    if not hasattr(torch, NAME):
        _setup_privateuseone_for_python_backend(NAME)
    return torch.device(NAME, 0)


def build_fake(config: RunConfig, rank: int) -> Run:
    """Build the run of `rank` on the fake device, with torch's own operations. Call inside `watched`."""
    device = FakeGPU(open_device(), "nccl")
    recorder = Recorder(device.timer())
    mesh = fake_mesh(
        topology_of(config.parallel), rank, recorder, tied=shares_embedding(config.model, config.parallel),
        collectives_in_pieces=True, placement=stages_of(config.model, config.parallel).placement,
    )  # fmt: skip
    with patch("torch.version.cuda", "12.9"):  # as of a torch that was built for the device
        return build_rank_run(config, mesh, device, StopRequest(), init_weights=False)

"""The protocol of state: the run's parts keep it, and a further part is saved and loaded in any layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megascale.core.rank import Rank
from tests.runs import LLAMA, build_run, config_of, settings
from tests.worlds import run_world

SIZES = LLAMA | {"num_layers": 1, "hidden_size": 16}


def averages(mesh: Any) -> Any:
    """A part with a vector of 8 elements, of which every rank has its share."""
    import torch

    from megascale.parallel.stateful import GlobalTensor, TensorShard

    class Averages:
        def __init__(self) -> None:
            self.share = 8 // mesh.world.size
            self.values = torch.zeros(self.share)
            self.calls: list[str] = []

        def global_tensors(self) -> dict[str, GlobalTensor]:
            piece = TensorShard((mesh.rank * self.share,), (self.share,), self.values)
            return {"averages.all": GlobalTensor((8,), torch.float32, [piece])}

        def flat_tensors(self) -> list[Any]:
            return [self.values]

        def begin_load(self, saved: Mapping[str, Sequence[int]], config: Mapping[str, Any]) -> dict[str, GlobalTensor]:
            self.calls.append(f"begin {tuple(saved.get('averages.all', ()))}")
            return self.global_tensors() if "averages.all" in saved else {}

        def end_load(self) -> None:
            self.calls.append("end")

        def end_restore(self) -> None:
            self.calls.append("restored")

    return Averages()


def with_averages(rank: Rank, config: Any, first: float | None) -> tuple[list[float], list[str]]:
    """Save values from `first` on, or resume. Returns the values and the calls of the part."""
    import torch

    from megascale.checkpoint.format.state import Progress
    from megascale.train.build import build_checkpoints

    unsaved = config.checkpoint.model_copy(update={"every": 0, "in_memory_every": 0})
    run = build_run(rank, config.model_copy(update={"checkpoint": unsaved}))
    part = averages(run.mesh)
    parts = [run.optimizer, *([] if first == -1.0 else [part])]
    checkpoints = build_checkpoints(config, run.mesh, parts, run.device)
    if first is None:
        assert checkpoints.resume() is not None
    else:
        part.values.copy_(torch.arange(part.share) + first + rank.rank * part.share)
        checkpoints.save(Progress(1, 8, 8))
    return part.values.tolist(), part.calls


def configured(folder: Path, **layout: Any) -> Any:
    return config_of(settings(SIZES, folder, train__precision="fp32", checkpoint__every=1, **layout), folder)


def test_a_further_part_is_saved_and_loaded_in_another_layout(tmp_path: Path) -> None:
    run_world(2, with_averages, configured(tmp_path, parallel__dp=2), 5.0)
    ((values, calls),) = run_world(1, with_averages, configured(tmp_path), None)
    assert values == [5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0]
    assert calls == ["begin (8,)", "end"]


def test_a_part_that_an_earlier_checkpoint_lacks_begins_afresh(tmp_path: Path) -> None:
    run_world(1, with_averages, configured(tmp_path), -1.0)
    ((values, calls),) = run_world(1, with_averages, configured(tmp_path), None)
    assert values == [0.0] * 8 and calls == ["begin ()", "end"]


def test_copies_in_memory_restore_it_too(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    memory = {"checkpoint__in_memory_every": 1, "checkpoint__in_memory_dir": str(tmp_path / "memory")}
    run_world(2, with_averages, configured(tmp_path, parallel__tp=2, **memory), 5.0)
    ranks = run_world(2, with_averages, configured(tmp_path, parallel__tp=2, **memory), None)
    assert [values for values, _ in ranks] == [[5.0, 6.0, 7.0, 8.0], [9.0, 10.0, 11.0, 12.0]]
    assert all(calls == ["restored"] for _, calls in ranks)


def keeps_protocol(rank: Rank, config: Any) -> list[tuple[bool, bool]]:
    """For every part: all pieces lie in its flat tensors; names are global."""
    run = build_run(rank, config)
    found = []
    for part in (run.optimizer, run.fp8_state):
        flats = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in part.flat_tensors()]
        pieces = [piece.data for tensor in part.global_tensors().values() for piece in tensor.shards]
        inside = all(any(a <= p.data_ptr() and p.data_ptr() + p.nbytes <= b for a, b in flats) for p in pieces)
        found.append((inside, bool(pieces)))
    return found


def test_the_parts_of_a_run_are_stateful(tmp_path: Path) -> None:
    keys = {"train__precision": "fp8", "fp8__recipe": "delayed", "model__num_layers": 4}
    config = config_of(settings(SIZES, tmp_path, **keys), tmp_path)
    assert run_world(1, keeps_protocol, config) == [[(True, True), (True, True)]]

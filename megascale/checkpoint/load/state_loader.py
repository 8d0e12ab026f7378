"""Loading of a checkpoint, or another project's weights, into the parts of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megascale.checkpoint.collective_errors import on_all_ranks, on_first_rank
from megascale.checkpoint.format import manifest
from megascale.checkpoint.format.state import Region
from megascale.checkpoint.load.reader import CheckpointReader, plan_reads
from megascale.comm.mesh import Mesh
from megascale.comm.totals import broadcast_bytes
from megascale.config.model import SAME_MODEL_HINT, ModelConfig, model_differences
from megascale.core.errors import CheckpointError
from megascale.core.storage import Location
from megascale.device import Device
from megascale.parallel.stateful import BALANCE_BIAS, WEIGHTS, Stateful


def _is_of_model(name: str) -> bool:
    """Return True for the name of a weight or of experts' biases."""
    return name.startswith(WEIGHTS) or name == BALANCE_BIAS


@dataclass(frozen=True)
class StateLoader:
    """Loads state into the `parts` of a run; all ranks call the methods together."""

    model: ModelConfig
    parts: Sequence[Stateful]
    mesh: Mesh
    device: Device

    def load(self, path: Location) -> tuple[manifest.Manifest, int]:
        """Load a checkpoint. Returns its manifest and the bytes read by all ranks.

        Raises: on every rank the same DamagedError if it is damaged, CheckpointError if it holds another model
        """
        text: list[bytes] = []
        on_first_rank(self.mesh.world, lambda: text.append(manifest.read_text(path)), f"the manifest of {path}")
        saved = manifest.parse(path, broadcast_bytes(self.mesh, b"".join(text), self.device.torch_device))
        self.check_same_model(path, saved.facts.config.get("model", {}))
        reader = CheckpointReader(path, saved, self.mesh.tp, self.device.torch_device)
        shapes = {name: tensor.shape for name, tensor in saved.tensors.items()}
        begun = [part.begin_load(shapes, saved.facts.config) for part in self.parts]
        tensors = {name: tensor for of_part in begun for name, tensor in of_part.items()}
        if saved.facts.progress.step == 0 and all(map(_is_of_model, shapes)):
            tensors = {name: tensor for name, tensor in tensors.items() if _is_of_model(name)}  # it has no more
        world = self.mesh.world
        requests = on_all_ranks(world, lambda: plan_reads(path, saved, tensors), f"the plan of {path}")
        on_all_ranks(world, lambda: reader.read(requests), f"reading {path}")
        for part in self.parts:
            part.end_load()
        return saved, sum(world.control.all_gather(reader.bytes_read, f"bytes of {path}"))

    def load_weights(self, name: str, model: Mapping[str, Any], read: Callable[[str, Region], Tensor]) -> None:
        """Load weights only: `read` returns a region of a tensor of `model`, in any dtype.

        Raises: CheckpointError if `model`, from `name`, is another model
        """
        self.check_same_model(name, model)
        for part in self.parts:
            for tensor_name, tensor in part.global_tensors().items():
                if tensor_name.startswith(WEIGHTS) or (tensor_name == BALANCE_BIAS and not self.mesh.rank):
                    for shard in tensor.shards:  # of biases those of the first rank, which `end_load` sums
                        shard.data.copy_(read(tensor_name.removeprefix(WEIGHTS), (shard.offset, shard.size)))
        for part in self.parts:
            part.end_load()

    def check_same_model(self, path: Location | str, saved: Mapping[str, Any]) -> None:
        """Compare a saved `[model]` section with this run's.

        Raises: CheckpointError with the keys that differ
        """
        if different := model_differences(saved, self.model):
            raise CheckpointError(f"{path} is of another model: {different}", hint=SAME_MODEL_HINT)

    def end_restore(self) -> None:
        """Let all parts know of a load from memory."""
        for part in self.parts:
            part.end_restore()

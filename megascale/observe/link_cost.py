"""The seconds of a step that slow messages cost the job: what their receivers wait for messages beyond their peers.

Most of a late message is hidden: compute goes on with other micro-batches, and a pipeline has slack. What is left shows
where it is received. Peers are the ranks of the same pipeline stage, which run the same schedule with the same bubble;
a rank that waits longer than they do ends its part of the step later by as much. The excess of the messages themselves
is a bound as well: a receiver may also wait for a slow rank before it.
"""

from __future__ import annotations

import numpy as np

from megascale.observe.delay_matrix import SlowPath
from megascale.observe.heatmap import compare
from megascale.observe.step_cube import Floats, StepCube


def message_waits(cube: StepCube) -> Floats:
    """Return by how many seconds of a step each rank waits longer for messages than its peers, [R]; mean over the
    ordinary steps.
    """
    received = [at for at, part in enumerate(cube.parts) if part.is_wait and part.name == "receive"]
    waits = compare(cube, cube.wait[:, :, received].sum(2, keepdims=True), cube.places.codes("pp"))
    return np.asarray((waits.seconds - waits.peer_s)[:, 0])


def link_cost(cube: StepCube, path: SlowPath, waits: Floats) -> float:
    """Return the seconds of a step that a slow path costs the job. `waits`: `message_waits` of the cube."""
    waited = waits[cube.places.index(np.array(path.receivers))]
    return max(0.0, min(path.per_step_s, float(waited.max(initial=0.0))))

"""Pipeline schedules: functions (p, v, m, rank) that return the compute actions (`schedule.ir`) of a rank.

p pipeline ranks, v model chunks per rank, m micro-batches (`schedule.one_f_one_b` draws one).

Facts: `v`: the only v, None for any. `unbounded_in_flight`: micro-batches in flight grow with m.
`periodic`: a few micro-batches, or groups of them (`schedule.interleaved`), predict all; planning otherwise simulates
all. `placement`: where the virtual stages are, a name of `layout.stages.PLACEMENTS`. `split`: some backwards are I and
W, in two. `pairs`: some are in an `ir.Overlap`. `peak`: a function of p, v and m, the most micro-batches that are live
on a rank, from forward to last gradient, summed over its chunks. A plug-in's card gives those that are not as in 1F1B,
and `periodic`.
"""

from collections.abc import Callable
from typing import Any

from megascale.core.registry import Card, Registry


def group_sizes(p: int, m: int) -> list[int]:
    """Split m micro-batches into groups that pass through the chunks together (`schedule.interleaved`), of nearly equal
    size, at least p unless m < p: larger groups, then smaller.

    A group smaller than p would return to rank 0 for its next chunk before the group has left the last rank: the ranks
    would deadlock in the steady phase.
    """
    count = max(1, m // p)
    size, larger = divmod(m, count)
    return [size + 1] * larger + [size] * (count - larger)


LOOP = {
    "v": 1, "unbounded_in_flight": False, "periodic": True, "placement": "loop", "split": False, "pairs": False,
    "peak": None,
}  # fmt: skip
V: dict[str, Any] = {"v": 2, "placement": "v", "split": True}


def _schedule(name: str, help: str, target: str, peak: Callable[[int, int, int], int], **facts: Any) -> Card:
    return Card(name, help, f"megascale.schedule.{target}", {**LOOP, **facts, "peak": peak})


SCHEDULES = Registry(
    "schedule",
    "megascale.schedules",
    [
        _schedule(
            "gpipe", "all forwards, then all backwards (Huang et al. 2019)", "gpipe:gpipe", lambda p, v, m: m,
            unbounded_in_flight=True,
        ),
        _schedule(
            "1f1b", "one forward, one backward: p micro-batches in flight, not m (Narayanan et al. 2021)",
            "one_f_one_b:one_f_one_b", lambda p, v, m: p,
        ),
        _schedule(
            "interleaved_1f1b", "1f1b with v chunks per rank: a bubble of (p-1)/(v m) (Narayanan et al. 2021)",
            "interleaved:interleaved_1f1b",
            lambda p, v, m: p if v == 1 else (v - 1) * group_sizes(p, m)[0] + 2 * p - 1, v=None,
        ),
        _schedule(
            "combined_1f1b",
            "interleaved_1f1b whose forwards hide the exchange of experts of backwards, and are hidden by them",
            "interleaved:combined_1f1b", lambda p, v, m: (v - 1) * group_sizes(p, m)[0] + 2 * p,
            v=None, pairs=True,
        ),
        _schedule(
            "zb_h1", "1f1b with split backwards: a bubble of (p-1)(F+I-W) (Qi et al. 2023)",
            "zero_bubble:interleaved_zb", lambda p, v, m: p, split=True,
        ),
        _schedule(
            "interleaved_zb",
            "interleaved_1f1b with split backwards: a bubble of (p-1)(F+I-W)/v, and p micro-batches in flight",
            "zero_bubble:interleaved_zb", lambda p, v, m: (v - 1) * group_sizes(p, m)[0] + p,
            v=None, split=True,
        ),
        _schedule(
            "zb_v",
            "split backwards on a V of two chunks per rank: a bubble of (p-1)max(F,I)/2, and p micro-batches in flight",
            "v_shaped:zb_v", lambda p, v, m: 2 * p, **V,
        ),
        _schedule(
            "v_half", "zb_v with half of its activations, and half of 1f1b's bubble if F = I = W (Qi et al. 2024)",
            "building_blocks:v_half", lambda p, v, m: 2 * (p // 2 + 1), periodic=False, **V,
        ),
        _schedule(
            "v_min",
            "zb_v with a third of its activations, and two thirds of 1f1b's bubble if F = I = W (Qi et al. 2024)",
            "building_blocks:v_min", lambda p, v, m: 2 * ((p + 4) // 3), periodic=False, **V,
        ),
        _schedule(
            "dualpipev", "a V whose forwards and backwards hide each other's exchange of experts (DeepSeek-AI 2024)",
            "v_shaped:dualpipev", lambda p, v, m: 2 * p + 1, pairs=True, **V,
        ),
    ],
    synonyms={
        "interleaved": "interleaved_1f1b", "interleaved1f1b": "interleaved_1f1b", "zb1p": "zb_h1", "zbh1": "zb_h1",
        "zero_bubble": "zb_h1", "interleavedzerobubble": "interleaved_zb", "zbv": "zb_v", "zbvzerobubble": "zb_v",
        "vhalf": "v_half", "v-half": "v_half", "vmin": "v_min", "v-min": "v_min", "combined": "combined_1f1b",
        "dualpipe_v": "dualpipev", "dualpipe": "",
    },
    facts={**LOOP, "periodic": False},
)  # fmt: skip

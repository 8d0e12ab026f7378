"""Pipeline schedules: functions (p, v, m, rank) that return the compute actions (`schedule.ir`) of a rank.

p pipeline ranks, v model chunks per rank, m micro-batches. 1F1B for p = 3, m = 4 (F, B: forward, backward; time ->):

    rank 0  F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3
    rank 1  .. F0 F1 .. B0 F2 B1 F3 B2 .. B3
    rank 2  .. .. F0 B0 F1 B1 F2 B2 F3 B3

Facts: `multi_chunk`: v > 1 is possible. `unbounded_in_flight`: micro-batches in flight grow with m. `periodic`: a few
micro-batches, or groups of them (`schedule.interleaved`), predict all; planning otherwise simulates all. `placement`:
where the virtual stages are, a name of `layout.stages.PLACEMENTS`. `split`: backwards are I and W, in two. `v`: the one
number of chunks per rank that the schedule has.
"""

from megascale.core.registry import Card, Registry

SCHEDULES = Registry(
    "schedule",
    "megascale.schedules",
    [
        Card(
            "gpipe",
            "all forwards, then all backwards (Huang et al. 2019)",
            "megascale.schedule.gpipe:gpipe",
            {"multi_chunk": False, "unbounded_in_flight": True, "periodic": True, "placement": "loop", "split": False},
        ),
        Card(
            "1f1b",
            "one forward, one backward: p micro-batches in flight, not m (Narayanan et al. 2021)",
            "megascale.schedule.one_f_one_b:one_f_one_b",
            {"multi_chunk": False, "unbounded_in_flight": False, "periodic": True, "placement": "loop", "split": False},
        ),
        Card(
            "interleaved_1f1b",
            "1f1b with v chunks per rank: a bubble of (p-1)/(v m) (Narayanan et al. 2021)",
            "megascale.schedule.interleaved:interleaved_1f1b",
            {"multi_chunk": True, "unbounded_in_flight": False, "periodic": True, "placement": "loop", "split": False},
        ),
        Card(
            "zb_h1",
            "1f1b with split backwards: a bubble of (p-1)(F+I-W) (Qi et al. 2023)",
            "megascale.schedule.zero_bubble:interleaved_zb",
            {"multi_chunk": False, "unbounded_in_flight": False, "periodic": True, "placement": "loop", "split": True},
        ),
        Card(
            "interleaved_zb",
            "interleaved_1f1b with split backwards: a bubble of (p-1)(F+I-W)/v, and p micro-batches in flight",
            "megascale.schedule.zero_bubble:interleaved_zb",
            {"multi_chunk": True, "unbounded_in_flight": False, "periodic": True, "placement": "loop", "split": True},
        ),
        Card(
            "zb_v",
            "split backwards on a V of two chunks per rank: a bubble of (p-1)F/2, and p micro-batches in flight",
            "megascale.schedule.v_shaped:zb_v",
            {"multi_chunk": True, "v": 2, "unbounded_in_flight": False, "periodic": True, "placement": "v",
             "split": True},
        ),
    ],
    synonyms={
        "interleaved": "interleaved_1f1b", "interleaved1f1b": "interleaved_1f1b", "zb1p": "zb_h1", "zbh1": "zb_h1",
        "zero_bubble": "zb_h1", "interleavedzerobubble": "interleaved_zb", "zbv": "zb_v", "zbvzerobubble": "zb_v",
        "dualpipe": "", "dualpipev": "",
    },
)  # fmt: skip

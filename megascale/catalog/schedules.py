"""Pipeline schedules: functions order(p, v, m, rank) that return the compute actions of one of p ranks, with v chunks
on each and m micro-batches, as a list (`schedule.ir`).

`chunks`: whether a rank may have several. `piles`: whether the more micro-batches there are, the more are alive at
once. `repeats`: whether a few of them show what many do, for they go one by one, or through several chunks in groups as
`schedule.interleaved` says; plans of schedules that do not say so go through all.
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
            {"chunks": False, "piles": True, "repeats": True},
        ),
        Card(
            "1f1b",
            "one forward, one backward: p live micro-batches instead of m (Narayanan et al. 2021)",
            "megascale.schedule.one_f_one_b:one_f_one_b",
            {"chunks": False, "piles": False, "repeats": True},
        ),
        Card(
            "interleaved_1f1b",
            "1f1b over v chunks a rank: a bubble of (p-1)/(v m) (Narayanan et al. 2021)",
            "megascale.schedule.interleaved:interleaved_1f1b",
            {"chunks": True, "piles": False, "repeats": True},
        ),
    ],
)

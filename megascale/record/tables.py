"""The tables of a log, in the writer's process: texts, totals, loads of experts, and the row of each group. Texts and
rows are written once, when first used.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence

from megascale.record import layout
from megascale.record.layout import WORD
from megascale.record.rank_state import RankRuns


class LogTables:
    """The tables in `memory`, whose numbers of 8 bytes are `words`.

    `texts`: index by text. `rows`: row by (group, kind, peer). `row_words`: by row, the place of its first number.
    """

    def __init__(self, memory: mmap.mmap, words: memoryview) -> None:
        self._memory = memory
        self._words = words
        self.texts: dict[str, int] = {}
        self.rows: dict[tuple[str, str, int], int] = {}
        self.row_words: list[int] = []
        self._totals: dict[str, int] = {}
        self._load_version = 0
        self._ranks: dict[tuple[str, str], RankRuns] = {}  # by group, and kind "control" or ""
        for text in ("", "(other)"):
            self.text(text)

    def write_text(self, offset: int, size: int, text: str) -> None:
        """Write a text, cut to `size` - 1 bytes, over zero bytes."""
        data = text.encode()[: size - 1]
        self._memory[offset : offset + len(data)] = data

    def text(self, text: str) -> int:
        """Return the index of a text; OTHER_TEXT if the table is full."""
        if (index := self.texts.get(text)) is not None:
            return index
        index = len(self.texts)
        if index >= layout.TEXTS:
            return layout.OTHER_TEXT
        self.write_text(layout.TEXTS_OFFSET + index * layout.TEXT_BYTES, layout.TEXT_BYTES, text)
        self.texts[text] = index
        self._words[layout.TEXT_COUNT] = index + 1
        return index

    def set_total(self, name: str, value: float) -> None:
        """Set a total; names that no longer fit are left out."""
        index = self._totals.setdefault(name, len(self._totals))
        if index < layout.TOTALS:
            place = layout.TOTALS_OFFSET + index * layout.TOTAL.size
            layout.TOTAL.pack_into(self._memory, place, self.text(name), value)
            self._words[layout.TOTAL_COUNT] = min(len(self._totals), layout.TOTALS)

    def set_expert_loads(self, step: int, experts: int, loads: Sequence[float]) -> None:
        """Set the loads of experts in a step, relative to the mean of their layer: those of each layer's `experts`, one
        layer after the other. A model with more than `layout.LOADS` of them is left out.
        """
        if len(loads) <= layout.LOADS:
            start, head = layout.LOADS_OFFSET, layout.LOADS_HEAD
            self._words[start // WORD] = self._load_version + 1
            struct.pack_into(f"<{len(loads)}e", self._memory, start + head.size, *loads)
            head.pack_into(self._memory, start, self._load_version + 1, step, len(loads) // experts, experts)
            self._load_version = self._words[start // WORD] = self._load_version + 2

    def open_group(self, name: str, ranks: Sequence[int], kind: str = "") -> None:
        """Note the global ranks of a group, before its first communication. `kind`: "control", or "" for the rest."""
        self._ranks[name, kind] = RankRuns.from_ranks(ranks)

    def add_row(self, group: str, kind: str, peer: int) -> int:
        """Take a row. The last row also stands for all that no longer fit."""
        row = len(self.row_words)
        if row == layout.GROUPS:
            self.rows[group, kind, peer] = row - 1
            return row - 1
        start = layout.GROUPS_OFFSET + row * layout.GROUP_BYTES
        ranks = self._ranks.get((group, kind if kind == layout.CONTROL else ""), RankRuns(()))
        first = start // WORD
        self._words[first + layout.GROUP_KIND] = layout.GROUP_KINDS.index(kind)
        self._words[first + layout.GROUP_PEER] = peer
        self._words[first + layout.GROUP_SIZE] = len(ranks) or -1
        name_start = start + layout.GROUP_NUMBERS * WORD
        self.write_text(name_start, layout.NAME_BYTES, group)
        if len(ranks.runs) <= layout.RUNS_OF_RANKS:
            for index, run in enumerate(ranks.runs):
                place = name_start + layout.NAME_BYTES + index * layout.RUN_OF_RANKS.size
                layout.RUN_OF_RANKS.pack_into(self._memory, place, *run)
        self.rows[group, kind, peer] = row
        self.row_words.append(first)
        self._words[layout.GROUP_COUNT] = row + 1
        return row

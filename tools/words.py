#!/usr/bin/env python3
"""Count the words of README.md and docs/: size, pronouns, instructions, code and figures, beside other projects' docs.

Writes docs/results/words.md. `--pages` prints one row a page instead, with its bound.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from results import write_page

ROOT = Path(__file__).parents[1]

MOST_WORDS = {
    "README.md": 700,
    "docs/index.md": 250,
    "docs/first-hour.md": 900,
    "docs/from-megatron.md": 500,
    "docs/recipes.md": 450,
    "docs/troubleshooting.md": 900,
    "docs/gpu.md": 600,
    "docs/launch.md": 1900,
    "docs/data.md": 1600,
    "docs/data-order.md": 1200,
    "docs/checkpointing.md": 1200,
    "docs/models.md": 680,
    "docs/fault-tolerance.md": 1400,
    "docs/node-checks.md": 800,
    "docs/watch.md": 900,
    "docs/sites.md": 500,
    "docs/slow-runs.md": 900,
    "docs/event-store.md": 600,
    "docs/metrics.md": 300,
    "docs/trace.md": 1000,
    "docs/configuration.md": 500,
    "docs/presets.md": 100,
    "docs/experts.md": 830,
    "docs/parallelism.md": 1300,
    "docs/schedules.md": 900,
    "docs/long-context.md": 2500,
    "docs/memory.md": 1400,
    "docs/planning.md": 1300,
    "docs/optimizers.md": 1800,
    "docs/low-precision.md": 1200,
    "docs/backends.md": 600,
    "docs/performance.md": 900,
    "docs/status.md": 420,
    "docs/security.md": 1300,
    "docs/architecture.md": 1700,
    "docs/paper-map.md": 1100,
    "docs/dependencies.md": 500,
    "docs/extending/backend.md": 150,
    "docs/extending/block.md": 330,
    "docs/extending/data_policy.md": 260,
    "docs/extending/optimizer.md": 200,
    "docs/extending/objective.md": 260,
    "docs/extending/recipe.md": 280,
    "docs/extending/sample_weight.md": 210,
    "docs/extending/schedule.md": 260,
}
"""Hand-written words of a page at most."""

MOST_WORDS_IN_ALL = 36_000

MOST_PRONOUNS = 0.03
"""Share of a page's words of prose."""

PRONOUNS = frozenset(["it", "that", "those", "what", "which", "who", "one", "others", "each", "so"])

VERBS = frozenset(
    """
    accept add adjust allow append apply ask avoid begin believe bind build call change check choose clear clone
    close compare compile compute configure connect consider convert copy count create cut debug decrease define
    delete disable divide do don't download drop enable end ensure exclude expand expect export extend extract fill
    find fix follow generate get give go ignore implement import include increase init initialize insert inspect
    install keep launch leave let limit list load look lower make mark match measure merge mind mix modify mount
    move multiply name note omit open overlap pack pass pick place plan please plot prefer prepare print profile
    provide put quote raise read rebuild record reduce refer register remove rename repeat replace report require
    rerun reserve reset resume return review run sample save scale search see select send set shard share show skip
    sort specify split start step stop store submit subtract suppose switch take tell test trace train trust try
    tune turn uninstall unset update upgrade use verify visit wait watch write
    """.split()  # noqa: SIM905
)
"""First words of an instruction."""

NOUNS = frozenset(
    """
    call change check compute copy count cut end export import launch limit list load look lower mark match measure
    mix mount move name note open overlap pack pass place plan plot profile report reset resume return run sample
    scale search set shard share show split start step store switch test trace train try turn update watch
    """.split()  # noqa: SIM905
)
"""Verbs that are nouns or adjectives, too: an instruction only before an object."""

OBJECT = re.compile(
    r"(?:[`*\"'\[\d]|[A-Z]|(?:the|a|an|all|any|both|no|only|this|these|that|those|your|its|their|every|each|one|two|three|"
    r"at|for|from|in|into|on|to|out|up|down|by|with|without|until|before|after|as|off|back|how|what|which|whether|if|"
    r"where|megascale|torchrun|make|more|fewer|less|smaller|larger|lower|higher|it|them|again|only|first|not|and|or)\b)"
)
"""The beginning of a verb's object or of an adverbial, as opposed to the rest of a compound noun."""

GENERATED = re.compile(r"<!-- ([\w-]+): begin -->\n.*?<!-- \1: end -->", re.DOTALL)
CODE = re.compile(r"^[ \t]*```.*?^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)


def prose_words(text: str) -> list[str]:
    """Return the words of a text without what is quoted as code."""
    return re.findall(r"[A-Za-z][A-Za-z'-]*", re.sub(r"`[^`]*`", " ", text))


def prose_blocks(text: str) -> Iterator[str]:
    """Yield the paragraphs and list items of a page on one line each; without code, tables, headings and generated
    regions.
    """
    text = CODE.sub("\n\n", GENERATED.sub("\n\n", text))
    for block in re.split(r"\n\s*\n|\n\s*[-*] |\n\s*\d+\. ", text):
        lines = [line.strip() for line in block.splitlines() if not line.lstrip().startswith(("|", "#"))]
        joined = re.sub(r"^(?:[-*+>]|\d+\.) +", "", " ".join(lines).strip())
        if prose_words(joined):
            yield joined


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a page's prose."""
    for block in prose_blocks(text):
        yield from filter(prose_words, re.split(r"(?<=[.:;?!])\s+", block))


def is_instruction(sentence: str) -> bool:
    """Return whether a sentence tells the reader to do something: its first word, or the first after an introductory
    phrase with a comma ("To resume, ...", "On GPUs, ...") or adverb ("Then ..."), is the base form of a verb.
    """
    sentence = LEADING.sub("", re.sub(r"[*_]+", "", sentence).lstrip("->+ \"'(["))
    verb, _, rest = sentence.partition(" ")
    verb = verb.lower().rstrip(",")
    return bool(rest) and verb in VERBS and (verb not in NOUNS or bool(OBJECT.match(rest)))


LEADING = re.compile(
    r"(?:(?:Then|First|Next|Otherwise|Instead|Please|Also|Now),? |"
    r"(?:To|If|When|Where|While|For|From|Before|After|With|Without|On|In|At|Under|Until)\b[^,]*, (?:then |please )?)",
    re.IGNORECASE,
)
"""Introductory words and phrases before an instruction."""


@dataclass(frozen=True)
class Style:
    """Measures of texts: all `words`, code and tables included; shares of `pronouns` among the words of prose and of
    `instructions` among its sentences; `you` per 1,000 words of prose; blocks of `code` per 1,000 words; `figures` per
    100 words of prose.
    """

    words: int
    pronouns: float
    instructions: float
    you: float
    code: float
    figures: float


ANCHORS = {
    "megascale, commit 317238b": Style(77_409, 0.048, 0.031, 0.4, 1.6, 4.0),
    "Megatron-LM user guide, 34 pages": Style(28_073, 0.017, 0.114, 3.0, 5.3, 1.5),
    "litgpt tutorials": Style(18_650, 0.017, 0.109, 18.7, 11.1, 2.7),
    "NVRx guides": Style(12_766, 0.020, 0.112, 1.2, 2.9, 1.0),
    "torchtitan docs, 11 pages": Style(8_257, 0.022, 0.175, 9.9, 5.6, 1.9),
    "OLMo-core guides": Style(7_436, 0.022, 0.105, 21.4, 7.9, 1.2),
}
"""Measures of a review in November 2026. This rule for instructions finds 2.8% where the review found 3.1%."""


def style(texts: Iterable[str]) -> Style:
    """Measure texts together."""
    texts = list(texts)
    words = sum(len(text.split()) for text in texts)
    blocks = [block for text in texts for block in prose_blocks(text)]
    prose = [word.lower() for block in blocks for word in prose_words(block)]
    told = [is_instruction(sentence) for text in texts for sentence in sentences(text)]
    figures = sum(len(re.findall(r"\d[\d.,]*", re.sub(r"`[^`]*`", " ", block))) for block in blocks)
    return Style(
        words,
        share(word in PRONOUNS for word in prose),
        share(told),
        1000 * share(word in ("you", "your") for word in prose),
        1000 * sum(len(CODE.findall(text)) for text in texts) / max(1, words),
        100 * figures / max(1, len(prose)),
    )


def share(hits: Iterable[bool]) -> float:
    """Return the share of hits; 0 without any."""
    hits = list(hits)
    return sum(hits) / max(1, len(hits))


def handwritten(text: str) -> int:
    """Count the words that a page's author wrote: without blocks of code and generated regions."""
    return sum(any(letter.isalnum() for letter in word) for word in CODE.sub("", GENERATED.sub("", text)).split())


def handwritten_in_all(texts: Mapping[str, str]) -> int:
    """Count the words that authors wrote in all pages."""
    return sum(map(handwritten, texts.values()))


def pages() -> dict[str, str]:
    """Return the text of README.md and of every page of docs/ but the results, by path."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    texts = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in found}
    return {name: text for name, text in texts.items() if not name.startswith("docs/results/")}


def table(styles: Mapping[str, Style]) -> str:
    """Format measures as a Markdown table."""
    head = ["", "words", "pronouns", "instructions", '"you" per 1,000', "code blocks per 1,000", "figures per 100"]
    rows = []
    for name, s in styles.items():
        rates = (f"{rate:.1f}" for rate in (s.you, s.code, s.figures))
        rows.append([name, f"{s.words:,}", f"{s.pronouns:.1%}", f"{s.instructions:.1%}", *rates])
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] + ["---:"] * 6, *rows])


def page_rows(texts: Mapping[str, str]) -> Iterator[str]:
    """Yield a line per page: its hand-written words, their bound, pronouns and instructions; then the sum."""
    for name, text in sorted(texts.items()):
        s, words, most = style([text]), handwritten(text), MOST_WORDS.get(name)
        mark = " " if most and words <= most and s.pronouns <= MOST_PRONOUNS else "!"
        shares = f"pronouns {s.pronouns:5.1%}  instructions {s.instructions:5.1%}"
        yield f"{mark} {words:6,} of {most or 0:5,}  {shares}  {name}"
    total = handwritten_in_all(texts)
    yield f"{'!' if total > MOST_WORDS_IN_ALL else ' '} {total:6,} of {MOST_WORDS_IN_ALL:,} in all"


def main() -> None:
    """Run the tool."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", action="store_true", help="print a line per page, with its bound; write nothing")
    options = parser.parse_args()
    texts = pages()
    if options.pages:
        print("\n".join(page_rows(texts)))
        return
    shown = table({"**megascale, README and docs**": style(texts.values()), **ANCHORS})
    note = (
        "Words are all words of the pages, tables and code included; the other columns count prose. Pages of results\n"
        f"are left out. Words written by hand, without code and generated tables: {handwritten_in_all(texts):,}."
    )
    measured = "This table compares size and style of README and docs with other projects' docs."
    print(f"{note}\n\n{shown}")
    write_page("words", "Words of the pages", measured, [note, shown])


if __name__ == "__main__":
    main()

"""Pages are short, tell the reader what to do, use nouns, and leave measurements to docs/results/."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from megascale.config.loading import sections
from results import RESULTS, read_heading
from words import (
    CODE,
    GENERATED,
    MOST_PRONOUNS,
    MOST_WORDS,
    MOST_WORDS_IN_ALL,
    NOUNS,
    ROOT,
    VERBS,
    handwritten,
    handwritten_in_all,
    is_instruction,
    pages,
    sentences,
    style,
)

TEXTS = pages()
LEAST_INSTRUCTIONS = 0.08
SECTIONS = sections()
SETTINGS = {
    f"{name}.{field.alias or key}" for name, part in SECTIONS.items() for key, field in part.model_fields.items()
}

OTHERS = {"checkpoint.last_save_in_hf", "train.gc_collect"}
"""Names like settings: a key of torchtitan, an OpenTelemetry span."""

TO_UNDERSTAND = {
    "docs/index.md": "a list of pages",
    "docs/from-megatron.md": "tables of names",
    "docs/recipes.md": "a table",
    "docs/presets.md": "a table",
    "docs/architecture.md": "for people who change the code",
    "docs/paper-map.md": "a table",
    "docs/dependencies.md": "tables",
    "docs/security.md": "who can do what to a job",
    "docs/status.md": "what has run",
}
"""Pages that need no instructions, and why: all others are for people who run, tune or extend."""

NAMES = frozenset(
    """
    torch torchrun torchtitan megascale megatron-core gloo srun sbatch mpirun jsrun pytorch-optimizer flash-attn liger
    te tp sp cp pp vpp dp q k v bf16 fp16 fp32 fp64 fp8 wgrad dgrad rope muP pip make
    """.split()  # noqa: SIM905
)
"""Names that stay in lower case at the beginning of a sentence."""

PERFORMANCE = "docs/performance.md"
"""The page with a summary of the results."""

SPARED = re.compile(
    r"default|values?\b|limit|bound|timeout|at most|at least|warning|example|setting|key\b|estimate|planned|expected",
    re.IGNORECASE,
)
"""Heads of columns whose numbers are chosen or planned, not measured."""

UNIT = r"(?:s|ms|us|µs|min|minutes|seconds|hours|%|x|tokens/s|[KMGT]i?B/s|[KMGT]bit/s|[MGTP]FLOP/s)"
MEASURED_CELL = re.compile(rf"[~<>+±-]{{0,2}}\d[\d.,]*\s*{UNIT}(?![\w/])")
MEASURED_HEAD = re.compile(rf"(?:^|[\s,(]){UNIT}(?:$|[\s,)])|MFU|loss\b")
NUMBER = re.compile(r"[~<>+±-]{0,2}\d[\d.,e+-]*(?![\w/])")


def paragraphs(text: str) -> list[str]:
    """The paragraphs of a page on one line each; no lists, tables, headings, pictures or code."""
    blocks = re.split(r"\n[ \t]*\n", CODE.sub("\n\n", GENERATED.sub("\n\n", text)))
    other = re.compile(r"\n?(?: {4}|\s*(?:[-*+>|#]|\d+\.|!\[|<)(?!\*))")
    return [" ".join(block.split()) for block in blocks if not other.match(block)]


def headless(paragraph: str) -> bool:
    """Whether a paragraph begins in lower case, or with a verb whose subject stands elsewhere."""
    first = re.match(r"[_(\[\"]*([A-Za-z][\w.'/-]*)", paragraph)
    if first is None or "/" in first[1]:  # a name in bold or as code, a path
        return False
    word = first[1].rstrip(".").removesuffix("'s")
    if word[0].islower():
        return word not in NAMES
    verb = word.lower()
    if verb in ("is", "are", "was", "were", "has", "does"):
        return "?" not in paragraph
    return verb.endswith("s") and (verb[:-1] in VERBS - NOUNS or verb[:-2] in VERBS - NOUNS)


def measured_columns(text: str) -> list[str]:
    """The heads of a page's columns with measurements: two numbers or more, at least half of the cells, are times,
    rates, percentages, losses or factors, by their own unit or by the head's. Heads of what people choose, such as
    defaults and limits, are spared, and so are bytes, counts and formulas.
    """
    found = []
    for table in re.findall(r"(?:^\|.*\|[ \t]*\n)+", CODE.sub("", GENERATED.sub("", text)) + "\n", re.MULTILINE):
        head, _, *rows = ([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table.splitlines())
        for place, name in enumerate(head):
            cells = [row[place] for row in rows if place < len(row) and row[place]]
            pattern = NUMBER if MEASURED_HEAD.search(name) else MEASURED_CELL
            measured = [cell for cell in cells if pattern.match(cell.strip("*"))]
            if not SPARED.search(name) and len(measured) >= max(2, len(cells) / 2):
                found.append(name)
    return found


@pytest.mark.parametrize("page", TEXTS)
def test_a_page_is_short(page: str) -> None:
    assert handwritten(TEXTS[page]) <= MOST_WORDS[page]


def test_all_pages_together_are_short() -> None:
    assert handwritten_in_all(TEXTS) <= MOST_WORDS_IN_ALL


def test_every_bound_is_of_a_page() -> None:
    assert MOST_WORDS.keys() == TEXTS.keys()
    assert TO_UNDERSTAND.keys() <= TEXTS.keys()


@pytest.mark.parametrize("page", TEXTS)
def test_a_page_uses_nouns(page: str) -> None:
    assert style([TEXTS[page]]).pronouns <= MOST_PRONOUNS


@pytest.mark.parametrize("page", [page for page in TEXTS if page not in TO_UNDERSTAND])
def test_a_page_tells_what_to_do(page: str) -> None:
    assert style([TEXTS[page]]).instructions >= LEAST_INSTRUCTIONS


@pytest.mark.parametrize("page", TEXTS)
def test_a_paragraph_has_its_subject(page: str) -> None:
    assert not [paragraph[:80] for paragraph in paragraphs(TEXTS[page]) if headless(paragraph)]


@pytest.mark.parametrize("page", [page for page in TEXTS if page != PERFORMANCE])
def test_measurements_are_results(page: str) -> None:
    assert not measured_columns(TEXTS[page])


@pytest.mark.parametrize("page", sorted(RESULTS.glob("*.md")), ids=lambda page: page.stem)
def test_a_result_says_how_it_was_measured(page: Path) -> None:
    assert read_heading(page).measured.endswith(".")


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and the editors make them."""
    headings = re.findall(r"^#+ +(.+?) *$", CODE.sub("", text), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    return {re.sub(r"[^\w -]", "", heading).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", [*TEXTS, "CHANGELOG.md", "CONTRIBUTING.md"])
def test_headings_that_links_name_exist(page: str) -> None:
    for target, anchor in re.findall(r"\]\(([\w./-]*)#([\w-]+)\)", (ROOT / page).read_text(encoding="utf-8")):
        path = (ROOT / page).parent / target if target else ROOT / page
        assert not path.exists() or anchor in anchors(path.read_text(encoding="utf-8")), f"{target}#{anchor}"


def named_settings(text: str) -> set[str]:
    """The settings, as section.key, of a page's TOML and of the quoted words outside of generated regions."""
    found = set(re.findall(r"`(\w+\.\w+)(?:\.\w+)*(?: = [^`]*)?`", CODE.sub("", GENERATED.sub("", text))))
    for block in re.findall(r"```toml\n(.*?)```", text, re.DOTALL):
        found |= {
            f"{name}.{key}" for name, table in tomllib.loads(block).items() if isinstance(table, dict) for key in table
        }
    return {name for name in found - OTHERS if name.partition(".")[0] in SECTIONS}


@pytest.mark.parametrize("page", TEXTS)
def test_settings_that_are_named_exist(page: str) -> None:
    assert named_settings(TEXTS[page]) <= SETTINGS


@pytest.mark.parametrize(
    ("sentence", "told"),
    [
        ("Run `make test` first.", True),
        ("To resume, run the same line again.", True),
        ("Then set `lr`.", True),
        ("**Do not** use `--standalone`.", True),
        ("Run folders follow your umask.", False),
        ("Runs end.", False),
        ("Compute takes no longer.", False),
        ("Stop", False),
        ("A rank sets the value.", False),
    ],
)
def test_an_instruction_begins_with_its_verb(sentence: str, told: bool) -> None:
    assert is_instruction(sentence) == told


def test_the_rules_find_what_they_look_for() -> None:
    page = (
        "# Title\n\nSome words:\n\n```\ncode\n```\n\nare some of its lines.\n\nWrites a file.\n\n- is a list\n\n"
        "tp splits.\n\n<!-- a: begin -->\nmany words here\n<!-- a: end -->\n\n`x` does. Is it so?\n"
    )
    assert [text for text in paragraphs(page) if headless(text)] == ["are some of its lines.", "Writes a file."]
    assert handwritten("a `b` |\n```\nc\n```\n<!-- a: begin -->\nd\n<!-- a: end -->\n") == 2
    assert list(sentences("A b. C: d\n\n- e\n\n| f |\n|---|\n")) == ["A b.", "C:", "d", "e"]
    found = measured_columns(
        "| layout | s a step | tokens/s | memory | default | x |\n|---|---|---|---|---|---|\n"
        "| tp2 | 1.5 | 1,200 | 3 GiB | 5 s | 79% |\n| pp2 | 2 | 900 | 2 GiB | 7 s | 80% |\n"
    )
    assert found == ["s a step", "tokens/s", "x"]
    assert anchors("# A title\n\n## `x`, and [y](z.md)\n") == {"a-title", "x-and-y"}
    assert named_settings("`train.stepz`, `train.lr = 1`, `a.b`\n```toml\n[model]\nx = 1\n```\n") == {
        "train.stepz",
        "train.lr",
        "model.x",
    }

"""Hints of mistakes in values say what to write: by the kind of a key, for all keys of the kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic.fields import FieldInfo

from megascale.catalog.presets import PRESETS
from megascale.config.loading import load_config, sections
from megascale.config.section import FEW_CHOICES, Choice
from megascale.config.value_words import choice_of, literals_of, values_in_words
from megascale.core.errors import ConfigError, Problem
from tests.config.test_mistakes import GOOD

FIELDS = {
    f"{table}.{field.alias or name}": field
    for table, section in sections().items()
    for name, field in section.model_fields.items()
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(GOOD)


def problem(key: str, override: str) -> Problem:
    """The mistake in a key after an override of it."""
    with pytest.raises(ConfigError) as caught:
        load_config("run.toml", [override])
    return next(problem for problem in caught.value.problems if problem.key == key)


def of_type(annotation: Any) -> list[str]:
    return [key for key, field in FIELDS.items() if field.annotation is annotation]


@pytest.mark.parametrize("key", of_type(bool))
@pytest.mark.parametrize(("value", "meant"), [("True", "true"), ("False", "false"), ("1", "true"), ("no", "false")])
def test_a_boolean(key: str, value: str, meant: str) -> None:
    hint = problem(key, f"{key}={value}").hint
    assert hint == (meant if value == "1" else f"{meant}, in lower case and without quotes")


@pytest.mark.parametrize("key", [key for key, field in FIELDS.items() if literals_of(field)])
def test_a_word(key: str) -> None:
    texts = [word for word in literals_of(FIELDS[key]) if isinstance(word, str)]
    for word in texts:
        assert problem(key, f"{key}={word.upper()}").hint == f"did you mean '{word}'?"
    found = problem(key, f"{key}=zzzzz")
    assert all(f'"{word}"' in found.hint for word in texts), found.hint


def numbers() -> dict[str, FieldInfo]:
    words = {key: " ".join(values_in_words(field)) for key, field in FIELDS.items()}
    return {key: FIELDS[key] for key, text in words.items() if "number" in text and "text" not in text}


@pytest.mark.parametrize("key", numbers())
def test_a_number_out_of_bounds_and_a_text(key: str) -> None:
    """The bounds that the key has."""
    for value in ("some", "-7"):
        hint = problem(key, f"{key}={value}").hint
        assert "number" in hint or "fp32" in hint, hint


@pytest.mark.parametrize("key", [key for key, field in FIELDS.items() if type(choice_of(field)) is Choice])
def test_a_choice(key: str) -> None:
    """Few choices are listed, of many the nearest; the hint says what to write."""
    choice = choice_of(FIELDS[key])
    assert choice is not None
    names = [*choice.also, *choice.registry.names()]
    found = problem(key, f"{key}=zzzzz")
    if len(names) <= FEW_CHOICES:
        assert all(name in found.message for name in names)
        assert found.hint.startswith("one of them")
    else:
        assert len(str(found)) < 200 and found.hint == f"docs/configuration.md lists all {len(names)}"
        assert problem(key, f"{key}={names[0]}x").hint == f"did you mean '{names[0]}'?"


@pytest.mark.parametrize("key", [key for key in FIELDS if not key.startswith("optimizer.groups")])
def test_no_hint_is_the_help_of_the_key(key: str) -> None:
    for value in ("zzzzz", "-1", "[[]]", "{x = 1}", "3.5"):
        try:
            load_config("run.toml", [f"{key}={value}"])
        except ConfigError as error:
            for one in error.problems:
                description = FIELDS[key].description or ""
                assert one.hint and description not in one.hint and len(one.hint) < 300, one


def test_a_preset_suggests_the_nearest_three() -> None:
    found = problem("model.preset", "model.preset=llama3-7b")
    assert found.message == "there is no preset 'llama3-7b'"
    assert found.hint == f"similar: llama3-70b, llama3-8b, llama3-3b; docs/presets.md lists all {len(PRESETS)}"


@pytest.mark.parametrize(("override", "hint"), [
    ("parallel.zero=4", "a whole number from 0, to 3"),
    *((f"train.precision={name}", "fp16, which needs loss scaling, is not supported: bf16")
      for name in ("fp16", "float16", "half", "16-mixed")),
    ("optimizer.name=sgd", "SGD is not supported"),
    ("parallel.schedule=DualPipe", "a second copy of the weights is not supported"),
])  # fmt: skip
def test_values_that_other_systems_have(override: str, hint: str) -> None:
    assert problem(override.partition("=")[0], override).hint.startswith(hint)


@pytest.mark.parametrize(("override", "hint"), [
    ("parallel.cp_mode=all_gather", "did you mean 'allgather'?"), ("parallel.cp_mode=a2a", "did you mean 'ulysses'?"),
    ("parallel.cp_mode=p2p", "did you mean 'ring'?"), ("model.position=learned_absolute", "did you mean 'learned'?"),
])  # fmt: skip
def test_words_of_other_systems_for_values(override: str, hint: str) -> None:
    assert problem(override.partition("=")[0], override).hint == hint


def test_an_unknown_key_of_a_large_table_has_suggestions_and_no_dump() -> None:
    assert len(str(problem("data.qqqqqq", "data.qqqqqq=1"))) < 200
    assert problem("data.reader_timout", "data.reader_timout=1").hint == "did you mean 'reader_timeout_s'?"


def test_text_in_the_place_of_a_dataset() -> None:
    Path("train.jsonl").write_text('{"text": "a"}\n')
    Path("texts").mkdir()
    for given in ("train.jsonl", "train"):
        found = problem("data.train", f"data={{train='{given}'}}")
        assert "megascale data prepare train.jsonl --output data/train --tokenizer FILE" in found.hint
    assert "megascale data prepare texts/*.jsonl" in problem("data.train", "data={train='texts'}").hint


@pytest.mark.parametrize("world", [63, 3])
def test_a_number_of_processes_by_an_option(world: int) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("run.toml", ["parallel.tp=2"], world, world_option="--gpus")
    (found,) = caught.value.problems
    assert (found.where, found.key) == ("command line", "--gpus")
    assert "dp divides the 8 micro-batches of a step" in found.hint

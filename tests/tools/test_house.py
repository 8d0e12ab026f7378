from pathlib import Path

from tools.house import closure, cycles, measures, read_package


def write(root: Path, **texts: str) -> None:
    (root / "megascale" / "train").mkdir(parents=True)
    for name, text in {"__init__": "", "train/__init__": "", **texts}.items():
        (root / "megascale" / f"{name}.py").write_text(text)


def test_what_is_loaded_and_what_is_named(tmp_path: Path) -> None:
    """An import for types loads nothing, but makes a circle."""
    write(
        tmp_path,
        **{
            "train/entry": "from megascale import a\n",
            "a": "from megascale.b import X\n",
            "b": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from megascale.a import Y\nX = 1\n",
            "c": "def f():\n    import megascale.a\n",
        },
    )
    modules = read_package(tmp_path)
    assert closure(modules, "megascale.train.entry") == modules.keys() - {"megascale.c"}
    assert closure(modules, "megascale.b") == {"megascale", "megascale.b"}
    assert cycles(modules) == [["megascale.a", "megascale.b"]]
    assert modules["megascale.c"].loads == set()


def test_long_functions_and_whole_configurations_are_named(tmp_path: Path) -> None:
    body = "\n".join(f"    x = {number}" for number in range(60))
    write(
        tmp_path,
        **{
            "train/entry": f"def long(a: int) -> None:\n{body}\n",
            "a": "def f(config: RunConfig) -> None: ...\ndef g(config: ModelConfig) -> None: ...\n",
        },
    )
    found = measures(tmp_path)
    assert found["functions over 50 lines"] == ["megascale.train.entry.long"]
    assert found["functions that take a whole RunConfig"] == ["megascale.a.f"]
    assert found["modules over 400 lines"] == []
    assert found["entries of the package's folder"] == 2

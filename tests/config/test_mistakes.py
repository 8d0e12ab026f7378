"""Mistakes in a configuration: all reported at once, in lines of place, key, value and hint."""

# ruff: noqa: E501 - lines of output are not wrapped
from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.cli.main import main
from megascale.config.loading import load_config
from megascale.core.errors import ConfigError

GOOD = """\
name = "good"
[model]
num_layers = 4
hidden_size = 32
num_heads = 4
vocab_size = 101
seq_length = 16
[batch]
global = 8
[train]
steps = 10
[optimizer]
lr = 1e-2
[data]
mock = true
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory."""
    monkeypatch.chdir(tmp_path)
    Path("good.toml").write_text(GOOD)
    return tmp_path


def problems(text: str, *overrides: str, world: int | None = None) -> list[str]:
    """The lines of the ConfigError of a configuration."""
    Path("run.toml").write_bytes(text.encode())
    with pytest.raises(ConfigError) as caught:
        load_config("run.toml", overrides, world)
    lines = str(caught.value).splitlines()
    assert lines[-1] == f"{len(lines) - 1} problem{'s' if len(lines) > 2 else ''}"
    return lines[:-1]


# a text of GOOD, its replacement, and the expected line (or its start)
MISTAKES: list[tuple[str, str, str]] = [
    ("num_layers = 4", "num_layer = 4\nnum_layers = 4", "run.toml:3  model.num_layer: there is no key 'num_layer' in [model]  -> did you mean 'num_layers'?"),
    ("num_layers = 4", 'num_layers = "four"', "run.toml:3  model.num_layers: 'four': should be a whole number  -> a whole number above 0, to 10000"),
    ("num_layers = 4", "num_layers = 4.0", "run.toml:3  model.num_layers: 4.0: should be a whole number  -> 4, without a decimal point"),
    ("num_layers = 4", 'num_layers = "4"', "run.toml:3  model.num_layers: '4': should be a whole number  -> 4, without quotes"),
    ("num_layers = 4", "num_layers = true", "run.toml:3  model.num_layers: true: should be a whole number  -> a whole number above 0, to 10000"),
    ("[batch]", "[parallel]\nep = true\n[batch]", "run.toml:9  parallel.ep: true: should be a whole number  -> a whole number above 0, to 1048576; the default is 1"),
    ("steps = 10", "steps = 10\ncompile = 0", "run.toml:12  train.compile: 0: should be true or false  -> false"),
    ("num_layers = 4", "num_layers = -4", "run.toml:3  model.num_layers: -4: should be greater than 0  -> a whole number above 0, to 10000"),
    ("num_layers = 4", "num_layers = 20_000", "run.toml:3  model.num_layers: 20000: should be less than or equal to 10000  -> a whole number above 0, to 10000"),
    ("num_layers = 4", "num_layers = 2020-02-02", "run.toml:3  model.num_layers: datetime.date(2020, 2, 2): should be a whole number  -> a whole number above 0, to 10000"),
    ("num_heads = 4", "num_heads = -4", "run.toml:5  model.num_heads: -4: should be greater than 0  -> a whole number above 0, to 67108864"),
    ("hidden_size = 32", "hidden_size = 0x" + "f" * 6000, "run.toml:4  model.hidden_size: a number of thousands of digits: should be less than or equal to 67108864  -> a whole number above 0, to 67108864"),
    ("hidden_size = 32", "hidden_size = 67108864", "run.toml:2  model.ffn_size: 268435456: should be less than or equal to 67108864  -> it follows hidden_size: change that, or write ffn_size"),
    ("num_heads = 4", 'num_heads = 4\nactivation = "gellu"', "run.toml:6  model.activation: 'gellu' is not one of gelu, gelu_tanh, swiglu, geglu, clamped_swiglu  -> did you mean 'gelu'?"),
    ("num_heads = 4", 'num_heads = 4\nactivation = ["gelu"]', "run.toml:6  model.activation: ['gelu']: should be text  -> one of them; the default is \"gelu\""),
    ("num_heads = 4", 'num_heads = 4\nposition = "alibi"', "run.toml:6  model.position: 'alibi': should be 'learned' or 'rope'  -> \"learned\" or \"rope\"; the default is \"learned\""),
    ("steps = 10", 'steps = 10\nobjectives = [{type = "jepa", weight = -1, every = 2}]', "run.toml:12  train.objectives: {'type': 'jepa', 'weight': -1, 'every': 2}: jepa needs predictor; weight should be a number, 0 or more; jepa has no every  -> {type = \"jepa\", weight = ..., predictor = ...}"),
    ("num_heads = 4", 'num_heads = 4\nrope_scaling = {type = "ntk", factor = 2.0}', "run.toml:6  model.rope_scaling: {'type': 'ntk', 'factor': 2.0}: type should be one of linear, dynamic, llama3, yarn  -> {type = \"linear\", factor = ...} or {type = \"dynamic\", factor = ...} or {type = \"llama3\", factor = ..., low_freq_factor = ..., high_freq_factor = ..., original_seq_length = ...} or {type = \"yarn\", factor = ..., original_seq_length = ...}"),
    ("num_heads = 4", 'num_heads = 4\nrope_scaling = {factor = 2.0}', "run.toml:6  model.rope_scaling: {'factor': 2.0}: type should be one of linear, dynamic, llama3, yarn  -> {type = \"linear\", factor = ...} or {type = \"dynamic\", factor = ...} or {type = \"llama3\", factor = ..., low_freq_factor = ..., high_freq_factor = ..., original_seq_length = ...} or {type = \"yarn\", factor = ..., original_seq_length = ...}"),
    ("num_heads = 4", 'num_heads = 4\nrope_scaling = {type = "linear", factr = 2.0}', "run.toml:6  model.rope_scaling: {'type': 'linear', 'factr': 2.0}: linear needs factor; linear has no factr  -> {type = \"linear\", factor = ...}"),
    ("num_heads = 4", 'num_heads = 4\nrope_scaling = {type = "yarn", factor = -1, original_seq_length = 0.5, truncate = 1}', "run.toml:6  model.rope_scaling: {'type': 'yarn', 'factor': -1, 'original_seq_length': 0.5, 'truncate': 1}: factor should be a number above 0; original_seq_length should be a whole number above 0; truncate should be true or false  -> {type = \"yarn\", factor = ..., original_seq_length = ...}"),
    ("num_heads = 4", 'num_heads = 4\nrope_scaling = {type = "linear", factor = "2"}', "run.toml:6  model.rope_scaling: {'type': 'linear', 'factor': '2'}: factor should be a number above 0  -> {type = \"linear\", factor = ...}"),
    ("steps = 10", 'steps = 10\nobjectives = [{type = "jepa", weight = "a", predictor = [1]}]', "run.toml:12  train.objectives: {'type': 'jepa', 'weight': 'a', 'predictor': [1]}: weight should be a number, 0 or more; predictor should be a whole number above 0  -> {type = \"jepa\", weight = ..., predictor = ...}"),
    ("num_heads = 4", 'num_heads = 4\nrope_scaling = "yarn"', "run.toml:6  model.rope_scaling: 'yarn': should be a table  -> {type = \"yarn\", factor = ..., original_seq_length = ...}"),
    ("num_heads = 4", "num_heads = 4\nhead_dim = 0", "run.toml:6  model.head_dim: 0: should be greater than 0  -> a whole number above 0, to 67108864"),
    ("num_heads = 4", "num_heads = 4\nsparse_attention = {stride = 1, blocks = 4, block = 1.5}", "run.toml:6  model.sparse_attention: {'stride': 1, 'blocks': 4, 'block': 1.5}: needs local_blocks; has no blocks, only local_blocks, stride, block; stride should be a whole number from 2, not 1; block should be a whole number from 1, not 1.5  -> for example {local_blocks = 4, stride = 8, block = 64}"),
    ("num_heads = 4", 'num_heads = 4\nattention_pattern = "LXS"', "run.toml:6  model.attention_pattern: 'LXS': has 'X'; kinds of attention are S: softmax attention, latent with kv_lora_rank; L: linear attention with a decay by head (MiniMax-01, Li et al. 2025)  -> letters of these kinds, such as \"LLLLLLLS\", or remove the key"),
    ("num_heads = 4", "num_heads = 4\nsparse_attention = 8", "run.toml:6  model.sparse_attention: 8: should be a table  -> a table"),
    ("num_heads = 4", "num_heads = 4\nwindow = -1", "run.toml:6  model.window: -1: should be greater than or equal to 0, or should be a list  -> a whole number from 0 or a list of whole numbers from 0"),
    ("num_heads = 4", "num_heads = 4\nwindow = true", "run.toml:6  model.window: true: should be a whole number, or should be a list  -> a whole number from 0 or a list of whole numbers from 0"),
    ("num_heads = 4", "num_heads = 4\nwindow = 1.5", "run.toml:6  model.window: 1.5: should be a whole number, or should be a list  -> a whole number from 0 or a list of whole numbers from 0"),
    ("num_heads = 4", "num_heads = 4\nwindow = []", "run.toml:6  model.window: []: should be a whole number, or list should have at least 1 item, not 0  -> a whole number from 0 or a list of whole numbers from 0"),
    ("num_heads = 4", "num_heads = 4\nwindow = [8, -8]", "run.toml:6  model.window: [8, -8]: should be a whole number, or should be greater than or equal to 0  -> a whole number from 0 or a list of whole numbers from 0"),
    ("num_heads = 4", "num_heads = 4\nwindow = [8, 'all']", "run.toml:6  model.window: [8, 'all']: should be a whole number  -> a whole number from 0 or a list of whole numbers from 0"),
    ("num_heads = 4", "num_heads = 4\nwindow = [8, 0, 8, 0, 8]", "run.toml:6  model.window: 5 numbers for 4 layers  -> at most 4: fewer repeat over the layers"),
    ("num_layers = 4", 'preset = "lama3-8b"', "run.toml:3  model.preset: there is no preset 'lama3-8b'  -> did you mean 'llama3-8b'?"),
    ("num_layers = 4", "preset = 3", "run.toml:3  model.preset: 3: should be text  -> text in quotes"),
    ("hidden_size = 32\n", "", "run.toml:2  model.hidden_size: missing  -> write hidden_size = ... in [model]: width of the residual stream"),
    ("global = 8", "total = 8\nglobal = 8", "run.toml:9  batch.total: there is no key 'total' in [batch]  -> known keys: micro, global, rampup"),
    ("[batch]\nglobal = 8\n", "", "run.toml  batch.global: missing  -> write global = ... in [batch]: sequences in a step, over all ranks"),
    ("mock = true", "mock = true\n[observe]\nledger = true", "run.toml:17  observe.ledger: there is no key 'ledger' in [observe]  -> is now observe.record_events"),
    ("mock = true", "mock = true\n[checkpoint]\npatience_s = 5.0", "run.toml:17  checkpoint.patience_s: there is no key 'patience_s' in [checkpoint]  -> is now checkpoint.retry_timeout_s"),
    ("steps = 10", "steps = 10\nlr = 3e-4", "run.toml:12  train.lr: there is no key 'lr' in [train]  -> did you mean 'optimizer.lr'?"),
    ("lr = 1e-2", "lr = nan", "run.toml:13  optimizer.lr: nan: should be a finite number  -> a number above 0"),
    ("lr = 1e-2", "lr = inf", "run.toml:13  optimizer.lr: inf: should be a finite number  -> a number above 0"),
    ("lr = 1e-2", "lr = 1e-2\nbetas = [0.9, 1]", "run.toml:14  optimizer.betas: 1: should be less than 1  -> a list of numbers from 0, below 1; the default is [0.9, 0.95]"),
    ("lr = 1e-2", "lr = 1e-2\nbetas = [0.9]", "run.toml:14  optimizer.betas: [0.9]: list should have at least 2 items, not 1  -> a list of numbers from 0, below 1; the default is [0.9, 0.95]"),
    ("mock = true", "mock = true\n[parallel]\nep = 2", "run.toml:17  parallel.ep: 2 ranks share experts, and model.experts is 0  -> 1, or model.experts"),
    ("mock = true", "mock = true\n[fp8]\nhistory = 10_000_000_000", "run.toml:17  fp8.history: 10000000000: should be less than or equal to 65536  -> a whole number above 0, to 65536; the default is 16"),
    ("mock = true", 'mock = true\n[parallel]\ndp = "aut"', "run.toml:17  parallel.dp: 'aut': should be a whole number, or should be 'auto'  -> did you mean 'auto'?"),
    ("mock = true", 'mock = true\n[parallel]\nschedule = "zigzag"', "run.toml:17  parallel.schedule: 'zigzag' is not one of gpipe, 1f1b, interleaved_1f1b, combined_1f1b, zb_h1, interleaved_zb, zb_v, v_half, v_min, dualpipev  -> one of them"),
    ("mock = true", "mock = true\n[parallel]\nzero = true", "run.toml:17  parallel.zero: true: should be a whole number  -> a whole number from 0, to 3; the default is 1"),
    ("mock = true", "train = [[-1, \"a\"]]", "run.toml:15  data.train: [[-1, 'a']]: should be text, or should be greater than 0  -> text in quotes or a list of [number above 0, text]"),
    ("mock = true", "mock = true\n[comm]\ntimeout_s = 0.9", "run.toml:17  comm.timeout_s: 0.9: should be greater than or equal to 1  -> a number from 1, to 1000000; the default is 600.0"),
    ("mock = true", "mock = true\n[launch]\nstart_timeout_s = 0.9", "run.toml:17  launch.start_timeout_s: 0.9: should be greater than or equal to 1  -> a number from 1, to 1000000; the default is 1800.0"),
    ("mock = true", 'mock = true\n[paralel]\ntp = 2', "run.toml:16  paralel: there is no key 'paralel'  -> did you mean 'parallel'?"),
    ("mock = true", 'mock = true\n[odd]\n"a\\nb" = 2', "run.toml:16  odd: there is no key 'odd'  -> known keys: name, output_dir, model, moe, parallel, overlap, batch, train, optimizer, fp8, backends, data, checkpoint, observe, launch, comm, nccl, fault, sites"),
    ('name = "good"', 'name = "a/b"', "run.toml:1  name: 'a/b' cannot name a folder  -> letters, digits, '.', '_' and '-', at most 128"),
    ('name = "good"', f'name = "{"n" * 200}"', f"run.toml:1  name: '{'n' * 76}... cannot name a folder  -> letters, digits, '.', '_' and '-', at most 128"),
    ('name = "good"\n', "", 'run.toml  name: missing  -> name = "my-run" at the top of the file'),
    ('name = "good"', 'name = "good"\nmodell = 3', "run.toml:2  modell: there is no key 'modell'  -> did you mean 'model'?"),
    ('name = "good"', "name = good", "run.toml:1  is not TOML: Invalid value (at line 1, column 8)  -> strings need quotes, tables need [brackets]"),
    ("mock = true", "mock = True", "run.toml:15  is not TOML: Invalid value (at line 15, column 8)  -> true and false are in lower case"),
    ("mock = true", "mock = null", "run.toml:15  is not TOML: Invalid value (at line 15, column 8)  -> TOML has no such value: leave out the key"),
    ("lr = 1e-2", "lr = 1e-2,  # as theirs", "run.toml:13  is not TOML: Expected newline or end of document after a statement (at line 13, column 10)  -> no comma behind a value"),
    ('name = "good"', "# a run\nname: good", "run.toml:2  is not TOML: Expected '=' after a key in a key/value pair (at line 2, column 5)  -> this is YAML: write TOML, key = value below [table]"),
    ('name = "good"', '{"name": "good"}', "run.toml:1  is not TOML: Invalid statement (at line 1, column 1)  -> this is JSON: write TOML, key = value below [table]"),
    ("num_layers = 4", "num_layers = 4\npp = [1,\n2 2]", "run.toml:5  is not TOML: Unclosed array (at line 5, column 3)  -> strings need quotes, tables need [brackets]"),
    ('name = "good"', f'name = {"9" * 5000}', "run.toml  is not TOML: Exceeds the limit"),
    ('name = "good"', f"name = {'[' * 5000}{']' * 5000}", "run.toml  is not TOML: maximum recursion depth exceeded"),
    ('name = "good"', 'name = "good"\nextends = "none.toml"', "run.toml:2  extends: there is no file none.toml  -> the path is relative to this file"),
    ('name = "good"', f'extends = "{"n" * 5000}"', "run.toml:1  extends: nnnn"),
    ('name = "good"', "extends = 3", 'run.toml:1  extends: must be the name of a file, not 3  -> extends = "other.toml"'),
    ('name = "good"', 'extends = "run.toml"', "run.toml:1  extends: circular: leads back to run.toml  -> remove one of them"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "line"), MISTAKES, ids=[f"{old[:20]}-{new[:40]}" for old, new, _ in MISTAKES])
def test_a_mistake_is_one_line(old: str, new: str, line: str) -> None:
    assert GOOD.count(old) == 1
    lines = problems(GOOD.replace(old, new))
    assert len(lines) == 1
    assert lines[0] == line if "  -> " in line else lines[0].startswith(line)


@pytest.mark.parametrize("repeated", ["mock = true", "[model]"])
def test_a_key_or_a_table_is_given_twice(repeated: str) -> None:
    (line,) = problems(f"{GOOD}\n{repeated}\n")
    assert line.endswith("-> a key or a table is given twice: keep one")


@pytest.mark.parametrize("table", ["Model", "modle"])
def test_keys_of_a_misspelled_table_are_not_missing(table: str) -> None:
    text = GOOD.replace("[model]", f"[{table}]")
    line = f"run.toml:2  {table}: there is no key '{table}'  -> did you mean 'model'?"
    assert problems(text) == problems(text, world=8) == [line]


def test_the_template_of_the_mistakes_is_valid() -> None:
    assert load_config("good.toml").model.num_layers == 4


BASE = """\
[model]
num_layers = 4
hidden_size = 32
num_heads = 5
vocab_size = 101
seq_lenght = 16
seq_length = 18

[optimizer]
lr = "1e-2"

[parallel]
tp = 4
sp = true
pp = 3
vpp = 3
"""
TOP = """\
name = "many"
extends = "base.toml"
[batch]
micro = 2
global = 7
[train]
steps = 10
precision = "bf61"
[data]
train = "nowhere/corpus"
tokenizer = "nowhere/tokenizer.json"
[checkpoint]
resume = "nowhere"
evry = 10
"""


def test_mistakes_of_several_files_are_reported_at_once(folder: Path) -> None:
    Path("base.toml").write_text(BASE)
    lines = problems(TOP, "observe.tensorboard=perhaps", "model.dropout=1.5", "model.num_kv_heads=2")
    assert sorted(lines) == sorted([
        "base.toml:6  model.seq_lenght: there is no key 'seq_lenght' in [model]  -> did you mean 'seq_length'?",
        "base.toml:10  optimizer.lr: '1e-2': should be a number  -> 1e-2, without quotes",
        "command line  model.dropout: 1.5: should be less than 1  -> a number from 0, below 1; the default is 0.0",
        "command line  observe.tensorboard: 'perhaps': should be true or false  -> true or false; the default is true",
        "run.toml:8  train.precision: 'bf61' is not one of fp32, bf16, fp8, fp64  -> did you mean 'bf16'?",
        "run.toml:14  checkpoint.evry: there is no key 'evry' in [checkpoint]  -> did you mean 'every'?",
        # findings of the rules in valid keys
        "base.toml:4  model.num_heads: hidden_size 32 is not divisible by 5 heads  -> one of 1, 2, 4, 8, 16, 32, or a head_dim",
        "command line  model.num_kv_heads: 5 heads cannot share 2 key-value heads  -> one of 1, 5",
        "base.toml:13  parallel.tp: 5 heads cannot be split over tp = 4  -> tp in 1",
        "base.toml:7  model.seq_length: with sp a sequence of 18 cannot be split over tp = 4  -> seq_length a multiple of 4, or sp = false",
        "base.toml:15  parallel.pp: 4 layers are too few for pp x vpp = 3 x 3 chunks  -> pp x vpp at most 6: only the first and the last chunk may have no layer",
        "run.toml:5  batch.global: 7 is not divisible by micro x dp = 2 x 1  -> 6 or 8",
        "run.toml:10  data.train: there is no file nowhere/corpus.bin nor nowhere/corpus.idx  -> `megascale data prepare` creates datasets",
        "run.toml:11  data.tokenizer: there is no file nowhere/tokenizer.json  -> remove the key, or give the tokenizer of the data",
        "run.toml:13  checkpoint.resume: there is no checkpoint in nowhere  -> auto, never, a folder with a manifest.json, a run's folder, or hf:FOLDER",
    ])  # fmt: skip


OVERRIDES = {
    "model": "command line  model: not a setting  -> write section.key=value",
    "=3": "command line  =3: not a setting  -> write section.key=value",
    "model.=3": "command line  model.=3: not a setting  -> write section.key=value",
    "..=3": "command line  ..=3: not a setting  -> write section.key=value",
    "model.num_layers=": "command line  model.num_layers: '': should be a whole number",
    "a.b.c.d=1": "command line  a: there is no key 'a'  -> known keys: name,",
    "model=3": "command line  model: must be a table, not 3  -> write [model] and its keys below it",
    "model.num_layers.x=3": "command line  model.num_layers: {'x': 3}: should be a whole number",
    'model.num_layers=7\nname="x"': """command line  model.num_layers: '7\\nname="x"': should be a whole number""",
    "model.num_layer=3": "command line  model.num_layer: there is no key 'num_layer' in [model]  -> did you mean",
    "name=a=b": "command line  name: 'a=b' cannot name a folder",
    "optimizer.lr=-1": "command line  optimizer.lr: -1: should be greater than 0",
    "data.mock=True": "command line  data.mock: 'True': should be true or false",
    "data.train=[[0.7, mine/train], [0.3, b]]": "command line  data.train: [[0.7, mine/train], [0.3, b]] is not TOML  -> quote text in a list or table: 'data.train=[[0.7, \"",
    "model={preset = llama3-8b}": "command line  model: {preset = llama3-8b} is not TOML  -> quote text in a list or table",
    "parallel={pp=8, vpp=2}": "command line  parallel.pp: 4 layers are too few for pp x vpp = 8 x 2 chunks  -> pp x vpp at most 6: only",
    "parallel.pp=8": "command line  parallel.pp: 4 layers are too few for pp x vpp = 8 x 1 chunks  -> pp at most 6: only",
    "good.toml": 'command line  good.toml: not a setting  -> one file, which may begin with extends = "good.toml"',
    "data.split=[0.8, 0.1, 0.1]": "command line  data.split: [0.8, 0.1, 0.1]: list should have at most 2 items, not 3  -> two shares, of training and validation: add the test share to the second, [0.8, 0.2]",
    "trainer.devices=8": "command line  trainer: there is no key 'trainer'  -> trainer.devices: nothing to write: torchrun",
    "zero_optimization.stage=3": "command line  zero_optimization: there is no key 'zero_optimization'  -> write parallel.zero = 3",
    "data.tokenizer=tokens": "command line  data.tokenizer: tokens is not a regular file  -> did you mean ",
    "extends=good.toml": "command line  extends: there is no key 'extends'",
}


@pytest.mark.parametrize("override", OVERRIDES)
def test_a_mistaken_override_is_one_line(override: str) -> None:
    Path("tokens").mkdir(exist_ok=True)
    Path("tokens/tokenizer.json").touch()
    (line,) = problems(GOOD, override)
    assert line.startswith(OVERRIDES[override])


def test_mistakes_in_overrides_are_reported_at_once() -> None:
    assert len(problems(GOOD, "model", "=3", "optimizer.lr=1")) == 2


def test_an_override_of_a_table_is_the_location_of_its_keys() -> None:
    lines = problems(GOOD, "model={num_layers=4, hidden_size=32, num_heads=3, vocab_size=8, seq_length=4}")
    assert lines == [
        "command line  model.num_heads: hidden_size 32 is not divisible by 3 heads  -> one of 1, 2, 4, 8, 16, 32, or a head_dim"
    ]


PATHS = {
    "none.toml": "none.toml  there is no such file  -> check the path",
    ".": ".  is a folder  -> give a TOML file",
    "run": "run  is a folder  -> did you mean run/config.toml?",
    "good.toml/x": "good.toml/x  cannot be read: [Errno 20] Not a directory: 'good.toml/x'",
    "x" * 5000: "x" * 5000 + "  cannot be read: [Errno 36] File name too long",
    "latin.toml": "latin.toml  cannot be read: 'utf-8' codec can't decode byte 0xe4 in position 8",
}


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path[:20])
def test_a_file_that_cannot_be_read(path: str) -> None:
    Path("latin.toml").write_bytes('name = "ä"'.encode("latin-1"))
    Path("run").mkdir()
    Path("run/config.toml").touch()
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    (problem,) = caught.value.problems
    assert str(problem).startswith(PATHS[path])


def test_an_empty_file_lacks_the_keys_without_defaults() -> None:
    assert [line.split("  ")[1].split(":")[0] for line in problems("")] == [
        "model.num_layers", "model.hidden_size", "model.num_heads", "model.vocab_size", "model.seq_length",
        "batch.global", "train.steps", "optimizer.lr", "name", "data.train",
    ]  # fmt: skip


def test_an_invalid_derived_size_is_reported_beside_an_unknown_key() -> None:
    assert len(problems(GOOD, "model.hidden_size=67108864", "model.extra=1")) == 2


def test_a_circular_extends_is_reported_at_its_last_file() -> None:
    Path("b.toml").write_text('# a comment\nextends = "run.toml"\n')
    assert problems('extends = "b.toml"\n' + GOOD) == [
        "b.toml:2  extends: circular: leads back to run.toml  -> remove one of them"
    ]


WORLDS = {
    (6, "parallel.tp=4"): "command line  parallel.tp: 6 processes are not a multiple of tp 4 x cp 1 x pp 1 = 4  -> start 4 or 8: dp divides the 8 micro-batches of a step",
    (3, "parallel.pp=4"): "command line  parallel.tp: 3 processes are not a multiple of tp 1 x cp 1 x pp 4 = 4  -> start 4: dp divides the 8 micro-batches of a step",
    (13, "parallel.tp=4"): "command line  parallel.tp: 13 processes are not a multiple of tp 4 x cp 1 x pp 1 = 4  -> start 8 or 16: dp divides the 8 micro-batches of a step",
    (3, "parallel.dp=2"): "command line  parallel.dp: tp 1 x cp 1 x pp 1 x dp 2 = 2, but there are 3 processes  -> start 2 processes",
    (8, "parallel.dp=2"): "command line  parallel.dp: tp 1 x cp 1 x pp 1 x dp 2 = 2, but there are 8 processes  -> dp = 8",
    (3, "parallel={tp=2, dp=2}"): "command line  parallel.dp: tp 2 x cp 1 x pp 1 x dp 2 = 4, but there are 3 processes  -> start 4 processes",
    (6, "batch.micro=1"): "run.toml:9  batch.global: 8 is not divisible by micro x dp = 1 x 6  -> 6 or 12",
    (10**12, "batch.micro=1"): "run.toml:9  batch.global: 8 is not divisible by micro x dp = 1 x 1000000000000  -> 1000000000000",
    (8, "parallel={pp=4, skip_ratio=0.8}"): "command line  parallel.skip_ratio: leaves some stage none of the 4 micro-batches in a step of a rank  -> at most 0.75, or a larger batch",
    (2, "batch.micro=3"): "run.toml:9  batch.global: 8 is not divisible by micro x dp = 3 x 1  -> 6 or 9",
}  # fmt: skip


def test_the_fewest_processes_have_a_batch() -> None:
    """Without a world, the fewest replicas whose stages have ranks for all experts."""
    keys = ["model.experts=8", "model.experts_per_token=2", "parallel.ep=8", "batch.micro=2"]
    (found,) = problems(GOOD, *keys)
    assert "batch.global: 8 is not divisible by micro x dp = 2 x 8  -> 16" in found


@pytest.mark.parametrize(("world", "override"), WORLDS)
def test_a_world_that_does_not_fit(world: int, override: str) -> None:
    assert problems(GOOD, override, world=world) == [WORLDS[world, override]]


def test_a_world_holds_the_longest_document() -> None:
    keys = ["parallel.hybrid_dp=true", "data.attention_mask=document", "data.max_tokens_per_rank=1"]
    assert problems(GOOD, *keys, world=8) == [
        "command line  data.max_tokens_per_rank: 8 ranks hold 8 tokens, and a document may have 16  -> 2 or more"
    ]


EXPERTS = ("model.experts=8", "model.bias=false")


@pytest.mark.parametrize(("layout", "found"), [
    (["parallel.ep=8", "batch.micro=2"], "good.toml:9  batch.global: 8 is not divisible by micro x dp = 2 x 8  -> 16"),
    (["parallel.ep=4", "moe.balance=group", "moe.balance_group=3"],
     "good.toml:9  batch.global: 8 is not divisible by micro x dp = 1 x 12  -> 12"),
])  # fmt: skip
def test_the_smallest_world_is_checked(layout: list[str], found: str) -> None:
    """Without a number of processes the layout's fewest have micro-batches, and whole groups of samples."""
    with pytest.raises(ConfigError) as caught:
        load_config("good.toml", [*EXPERTS, *layout])
    assert str(caught.value).splitlines()[:-1] == [found]


def test_the_smallest_world_has_room() -> None:
    """Groups of samples and pools of documents need replicas, which divide the batch."""
    groups = load_config("good.toml", [*EXPERTS, "parallel.ep=2", "moe.balance=group", "moe.balance_group=4"])
    pool = ("parallel.hybrid_dp=true", "data.max_tokens_per_rank=6", "data.attention_mask=document")
    assert (groups.dp, load_config("good.toml", pool).dp) == (4, 4)


def test_the_layout_of_a_search_is_not_checked() -> None:
    """The search replaces the layout, which fits no number of processes."""
    config = load_config("good.toml", [*EXPERTS, "parallel.ep=8", "batch.micro=2"], skip_sections=["parallel"])
    assert config.parallel.ep == 8


@pytest.mark.parametrize("layout", [{"parallel.ep": 3}, {"parallel.tp": 2, "parallel.ep": 2}])
@pytest.mark.parametrize("world", [None, 8])
def test_a_mistake_is_listed_once(layout: dict[str, int], world: int | None) -> None:
    """Rules that are checked again for the number of processes find the same, once."""
    lines = problems(GOOD, *EXPERTS, *(f"{key}={value}" for key, value in layout.items()), world=world)
    assert len(lines) == 1, lines


@pytest.mark.parametrize(
    ("world", "override", "dp"), [(8, "parallel.tp=2", 4), (2, "parallel.dp=2", 2), (1, "name=a", 1)]
)
def test_a_world_that_fits(world: int, override: str, dp: int) -> None:
    config = load_config("good.toml", [override], world)
    assert (config.dp, config.world_size) == (dp, world)


# Any value of any type for any key is valid or a ConfigError, never another exception.
KEYS = ["name", "model", "batch", "data", "model.preset", "model.num_heads", "model.activation", "model.window",
        "model.norm_eps", "parallel.dp", "parallel.layers_per_chunk", "parallel.schedule", "batch.global",
        "train.precision", "optimizer.betas", "data.train", "data.split", "data.tokenizer", "checkpoint.resume",
        "checkpoint.async", "output_dir", "extra", "model.extra", "data.mock.x"]  # fmt: skip
VALUES = ["-1", "0", "1", "7", "9223372036854775807", "1" + "0" * 60, "1.5", "nan", "-inf", "true", "''", "'x'", "auto",
          "[]", "[[]]", "[1, 2]", "[nan, 1]", "[[1, 'x']]", "[['x', 1]]", "['a', 'a']", "{}", "{x = 1}", "[{x = 1}]",
          "2020-02-02", "12:30:00", "[" * 400, "é\u2028", "1\t2"]  # fmt: skip


@given(st.lists(st.tuples(st.sampled_from(KEYS), st.sampled_from(VALUES)), min_size=1, max_size=4), st.integers(1, 9))
def test_no_override_causes_another_exception(settings: list[tuple[str, str]], world: int) -> None:
    try:
        load_config("good.toml", [f"{key}={value}" for key, value in settings], world)
    except ConfigError as error:
        assert all("\n" not in str(problem) for problem in error.problems)


@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_no_file_causes_another_exception(content: bytes) -> None:
    Path("odd.toml").write_bytes(GOOD.encode() + content)
    try:
        load_config("odd.toml")
    except ConfigError as error:
        assert all("\n" not in str(problem) for problem in error.problems)


def test_the_command_prints_the_problems_and_exits_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("check", "train"):
        assert main([command, "good.toml", "model.num_heads=3", "batch.micro=3"]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err == (
            "command line  model.num_heads: hidden_size 32 is not divisible by 3 heads  -> one of 1, 2, 4, 8, 16, 32, or a head_dim\n"
            "good.toml:9  batch.global: 8 is not divisible by micro x dp = 3 x 1  -> 6 or 9\n"
            f"2 problems{'; nothing was launched' if command == 'train' else ''}\n"
        )
    assert not Path("runs").exists()


def test_an_invalid_key_disables_only_the_rules_that_read_the_key() -> None:
    lines = problems(
        GOOD, "parallel.tp=abc", "parallel.pp=99", "batch.global=7", "batch.micro=2", "model.num_kv_heads=3"
    )
    assert [line.split("  ")[1].split(":")[0] for line in lines] == [
        "parallel.tp", "model.num_kv_heads", "parallel.pp", "batch.global"
    ]  # fmt: skip
    wrong_size = problems(GOOD, "model.hidden_size=wide", "model.num_layers=2", "parallel.pp=5", "optimizer.min_lr=1")
    assert [line.split("  ")[1].split(":")[0] for line in wrong_size] == [
        "model.hidden_size", "parallel.pp", "optimizer.min_lr"
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["1", "2026-11-21", "true", "nan", "1e3", "a"])
def test_a_text_on_the_command_line_needs_no_quotes(name: str) -> None:
    config = load_config("good.toml", [f"name={name}", f"output_dir={name}", f"data.cache={name}"])
    assert config.name == name and config.folder == Path(name).absolute() / name
    assert config.data.cache == str(Path(name).absolute())


def test_a_home_folder_is_expanded() -> None:
    assert load_config("good.toml", ["output_dir=~/runs"]).folder == Path.home() / "runs" / "good"


def test_an_unknown_key_disables_no_rule() -> None:
    lines = problems(GOOD, "model.extra=1", "parallel.tp=2", world=3)
    assert [line.split("  ")[1].split(":")[0] for line in lines] == ["model.extra", "parallel.tp"]


def test_auto_is_an_unset_key_also_beside_mistakes() -> None:
    lists = ["parallel.layers_per_chunk", "train.recompute_ops"]
    keys = ["parallel.pp=2", "parallel.vpp=2", *(f"{key}=auto" for key in lists)]
    with pytest.raises(ConfigError) as caught:
        load_config("good.toml", [*keys, "parallel.sp=yes", "train.steps=x"])
    assert [problem.key for problem in caught.value.problems] == ["parallel.sp", "train.steps"]
    config = load_config("good.toml", keys, world_size=2)
    assert config.parallel.layers_per_chunk is config.train.recompute_ops is None


def test_a_path_named_auto_is_a_value_beside_mistakes() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("good.toml", ["data.mock=false", "data.train=auto", "data.split=x"])
    assert "there is no file auto.bin" in str(caught.value)

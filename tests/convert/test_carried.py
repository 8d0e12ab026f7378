"""What one step was told, and what lay beside foreign weights, is known to the later steps."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from megascale.cli.main import main
from megascale.convert import generate
from megascale.data.read.indexed_dataset import read_info
from tests.data.prepare.test_tokenizer import byte_level
from tests.jobs import finish, job_config
from tests.runs import LLAMA

STOP, CHAT, BOS = "<|stop|>", "<|chat|>", "<|go|>"
MODEL = LLAMA | {"num_layers": 1, "vocab_size": 259, "seq_length": 32}
ARGUMENTS = {
    "train__precision": "fp32",
    "train__steps": 2,
    "optimizer__warmup_steps": 0,
    "data__mock": False,
    "checkpoint__every": 1,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of unusual special tokens, and a dataset made with `--eod` and `--add-bos`."""
    folder = tmp_path_factory.mktemp("carried")
    byte_level(STOP, CHAT, BOS).save(str(folder / "tokens.json"))
    (folder / "texts.jsonl").write_text('{"text": "' + "some text " * 100 + '"}\n')
    (folder / "chat").mkdir()
    shutil.copy(folder / "tokens.json", folder / "chat" / "tokenizer.json")
    special = {"eos_token": CHAT, "bos_token": BOS}
    keys = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{{ messages }}", **special}
    (folder / "chat" / "tokenizer_config.json").write_text(json.dumps(keys))
    return folder


def prepare(folder: Path, tokenizer: str, name: str, *words: str) -> Path:
    paths = [str(folder / "texts.jsonl"), "--output", str(folder / name), "--tokenizer", str(folder / tokenizer)]
    assert main(["data", "prepare", *paths, "--workers", "1", *words]) == 0
    return folder / name


def test_sample_and_convert_know_the_end_that_prepare_was_told(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer alone does not say it; the tokenizer's file may be gone."""
    from transformers import AutoConfig, AutoTokenizer

    tokenizer = tmp_path / "tokens.json"
    shutil.copy(folder / "tokens.json", tokenizer)
    prefix = prepare(folder, str(tokenizer), "told", "--eod", STOP)
    config = job_config(tmp_path, MODEL, data__train=str(prefix), **ARGUMENTS)
    finish(config)
    tokenizer.unlink()
    run = tmp_path / "runs" / "test"
    assert main(["ckpt", "convert", str(run), str(tmp_path / "hf")]) == 0
    assert "WARNING" not in capsys.readouterr().err
    assert AutoConfig.from_pretrained(tmp_path / "hf").eos_token_id == 256
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").eos_token == STOP
    stops = []
    monkeypatch.setattr(generate, "_generate_one", lambda model, frame, *_: stops.append((frame.bos, frame.stop)) or "")
    for source in (run, tmp_path / "hf"):
        assert main(["sample", str(source)]) == 0
    assert stops == [(None, [256])] * 2
    assert main(["sample", str(run), "--eod", CHAT]) == 0
    assert stops[-1] == (None, [257, 256])
    assert main(["sample", str(run), "--eod", "<none>"]) == 3


@pytest.mark.slow
def test_companions_of_foreign_weights_return(folder: Path, tmp_path: Path) -> None:
    """Through two runs; eos ids that are a list; the data's end of document is one more id that ends a text."""
    from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    keys = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    sizes = {"num_key_value_heads": 2, "max_position_embeddings": 32, "rms_norm_eps": 1e-5, "vocab_size": 259}
    chat = LlamaForCausalLM(LlamaConfig(**keys, **sizes, bos_token_id=258, eos_token_id=[257, 7], pad_token_id=3))
    chat.generation_config.eos_token_id = [257, 7]
    chat.save_pretrained(tmp_path / "chat")
    shutil.copytree(folder / "chat", tmp_path / "chat", dirs_exist_ok=True)
    named = prepare(folder, "chat/tokenizer.json", "named", "--add-bos")
    told = prepare(folder, "chat/tokenizer.json", "told", "--eod", STOP)
    info = read_info(named)
    assert info and (info.tokenizer.eod, info.tokenizer.bos) == (257, 258)
    first = tmp_path / "first" / "runs" / "test"
    resume = {"checkpoint__resume": f"hf:{tmp_path / 'chat'}"}
    one_step = ARGUMENTS | {"train__steps": 1}
    finish(job_config(tmp_path / "first", MODEL, data__train=str(named), **resume, **one_step))
    resume = {"checkpoint__resume": str(first)}
    finish(job_config(tmp_path / "second", MODEL, data__train=str(told), **resume, **ARGUMENTS))
    for run, eos in ((first, [257, 7]), (tmp_path / "second" / "runs" / "test", [257, 7, 256])):
        back = run.parent / "back"
        assert main(["ckpt", "convert", str(run), str(back)]) == 0
        assert {path.name for path in back.iterdir()} == {path.name for path in (tmp_path / "chat").iterdir()}
        for name in ("tokenizer.json", "tokenizer_config.json"):
            assert (back / name).read_bytes() == (tmp_path / "chat" / name).read_bytes()
        config, generation = AutoConfig.from_pretrained(back), json.loads((back / "generation_config.json").read_text())
        assert (config.eos_token_id, config.bos_token_id, config.pad_token_id) == (eos, 258, 3)
        assert generation["eos_token_id"] == eos


def test_datasets_of_different_ends_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefixes = [prepare(folder, "tokens.json", name, "--eod", eod) for name, eod in (("a", STOP), ("b", CHAT))]
    blend = [[1.0, str(prefix)] for prefix in prefixes]
    config = job_config(folder / "blend", MODEL, data__train=blend, **ARGUMENTS)
    assert main(["check", str(config)]) == 2
    words = f"documents of {prefixes[0]} end with token 256, those of {prefixes[1]} end with token 257"
    assert words in " ".join(capsys.readouterr().err.split())

"""The training command of a script is read as a shell would run it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.config.foreign.shell_script import ShellScript, split_words

TRAIN = "torchrun pretrain_gpt.py"


def command(text: str, *arguments: str, **environment: str) -> str:
    """The words behind the program, in one line."""
    return " ".join(ShellScript(text, environment, arguments).command).removeprefix(TRAIN).strip()


@pytest.mark.parametrize(("script", "words"), [
    (f"{TRAIN} --lr 1 # not --this", "--lr 1"),
    (f"{TRAIN} \\\n  --lr 1 \\\n  --bf16\n", "--lr 1 --bf16"),
    (f"A=(\n  --lr 1  # why\n  # --fp16\n  --bf16\n)\n{TRAIN} ${{A[@]}}", "--lr 1 --bf16"),
    (f"A=(--lr 1)\nA+=(--bf16)\n{TRAIN} \"${{A[@]}}\" $A", "--lr 1 --bf16 --lr 1 --bf16"),
    (f"A=--lr\nA+=' 1'\n{TRAIN} $A", "--lr 1"),
    (f"N=4\n{TRAIN} --num-layers $N --x ${{N}}", "--num-layers 4 --x 4"),
    (f": ${{N:=8}} ${{M:?not set}}\n{TRAIN} --n $N --m ${{M:?}}", "--n 8 --m $M"),
    (f"if [ -f x ]; then A=1; : ${{B:=2}}; fi\n{TRAIN} ${{A:-3}} $B", "$A $B"),
    (f"N=${{1:-8}}\n{TRAIN} --num-layers $N", "--num-layers 8"),
    (f"D=${{2:-\"a b\"}}\n{TRAIN} --save \"$D/x\"", "--save a b/x"),
    (f"A=2; B=3\nC=$(($A * B + 1))\n{TRAIN} --c $C", "--c 7"),
    (f"A=''\n{TRAIN} $A --lr 1 ${{A:+--x}}", "--lr 1"),
    (f"A='--fp8-format hybrid'\nB=(\"$A\")\n{TRAIN} ${{B[@]}}", "--fp8-format hybrid"),
    (f"export A=1 B=2\n{TRAIN} --a $A --b $B", "--a 1 --b 2"),
    ('OPTIONS=" \\\n --lr 1 \\\n --bf16"\n' + f'srun sh -c "{TRAIN} $OPTIONS"',
     "srun sh -c torchrun pretrain_gpt.py --lr 1 --bf16"),
    (f'CMD="{TRAIN} --lr 1"\neval $CMD', "eval torchrun pretrain_gpt.py --lr 1"),
    (f"{TRAIN} --lr 1 2>&1 | tee log", "--lr 1"),
    ("P=pretrain_gpt.py\ntorchrun $P --lr 1", "--lr 1"),
    (f"A=(\n  --lr 1 # why \\\n  --bf16 # \\\n)\n{TRAIN} ${{A[@]}}", "--lr 1 --bf16"),
    (f"# note \\\nexport SEED=4\n{TRAIN} --x 'a#' \\\n --seed $SEED", "--x a# --seed 4"),
    (f"W=9; T=2\nA=$((W / (T*2) - 1)); B=$((A % 2))\n{TRAIN} --a $A --b $B", "--a 1 --b 1"),
    (f"W=9\n{TRAIN} --a $(( W / 0 )) --b $((W**2)) --c $((NONE + 1))",
     "--a $(( W / 0 )) --b $((W**2)) --c $((NONE + 1))"),
    (f"A=(--lr 1)\nA[1]=2\nB=1; unset B\n{TRAIN} ${{A[@]}} $B", "$A $B"),
    (f"{TRAIN} --split '99,1' --x \"it's\"", "--split 99,1 --x it's"),
])  # fmt: skip
def test_words(script: str, words: str) -> None:
    assert command(script) == words


@pytest.mark.parametrize(("condition", "value"), [
    ('[ "$D" = fp8 ]', "yes"), ("[[ $D == 'bf16' ]]", "no"), ("[ ! -z $D ]", "yes"), ("[ -n \"$NONE\" ]", "no"),
    ('[[ "$D" == "x" ]] || [[ "$D" == "fp8" ]]', "yes"), ('[ "$D" = fp8 ] && [ -n "$NONE" ]', "no"),
    ("[ $N -eq 1 ]", "yes"), ("[ -f /etc/passwd ]", "$A"), ("command -v nvcc", "$A"), ("[ $N -gt 0 ]", "yes"),
])  # fmt: skip
def test_conditions(condition: str, value: str) -> None:
    script = f"D=fp8; N=1\nif {condition}; then\n  A=yes\nelse\n  A=no\nfi\n{TRAIN} --a $A"
    assert command(script) == f"--a {value}"


def test_one_branch_is_followed() -> None:
    script = "\n".join([
        "if [ $S = small ]; then N=1", "elif [ $S = large ]", "then N=2", "  if [ $N = 2 ]; then M=3; fi",
        "else N=9", "fi", f"{TRAIN} $N $M",
    ])  # fmt: skip
    assert [command(script, S=size) for size in ("small", "large", "other")] == ["1 $M", "2 3", "9 $M"]


def test_what_is_not_followed_is_unknown() -> None:
    script = (
        f"A=1; B=2; C=3\nfor x in 1 2; do A=$x; done\ncase $1 in a) B=4;; esac\n[ -f x ] && C=5\n{TRAIN} $A $B $C $D"
    )
    assert command(script, D="6") == "$A $B $C 6"
    assert command(f"D=$(pwd)/x\n{TRAIN} --save $D") == "--save $(pwd)/x"


def test_options_of_a_script_that_are_not_given() -> None:
    script = f"A=1\nwhile [[ $# -gt 0 ]]; do\n  case $1 in\n  --a) A=$2; shift 2 ;;\n  esac\ndone\n{TRAIN} $A"
    assert command(script) == "1"
    assert command(script, "--a", "2") == "$A"


def test_all_words_behind_a_script() -> None:
    assert command(f'{TRAIN} "$@" --lr 1') == command(f"{TRAIN} $* --lr 1") == "--lr 1"
    assert ShellScript(f'{TRAIN} "$@"', {}, ["--save", "a b"]).command[-2:] == ["--save", "a b"]
    assert command(f'N=$1; shift\n{TRAIN} --x $N "$@" $1', "8", "--bf16") == "--x 8 $@ $1"


def test_nothing_runs(tmp_path: Path) -> None:
    script = ShellScript(
        f"touch {tmp_path}/made\nA=`touch {tmp_path}/made`\n{TRAIN} $(touch {tmp_path}/made) --lr 1", {}
    )
    assert script.command[-2:] == ["--lr", "1"]
    assert not list(tmp_path.iterdir())


def test_words_of_a_command() -> None:
    assert ShellScript(f"D=$(date +%s)\n{TRAIN} $D $(cat b.txt)", {}).command[-2:] == ["$(date +%s)", "$(cat b.txt)"]
    assert split_words("--lr 1 # why \\\n--bf16 \\\n--x") == ["--lr", "1", "--bf16", "--x"]


def test_training_commands_that_differ() -> None:
    script = f"C='{TRAIN} --lr 1'\necho $C --x\n$C\neval $C\nsrun $C\n[ -f x ] && {TRAIN} --lr 2"
    assert [list(words[-2:]) for words in ShellScript(script, {}).commands] == [["--lr", "1"], ["--lr", "2"]]


def test_a_script_without_training() -> None:
    assert ShellScript("echo pretrain_gpt.py\nls ')'\n", {}).command == []


PIECES = st.sampled_from([
    *"\"'`(){}[]$#;&|<>\\\n =", "A", "1", "$A", "${A", "${A:-", "}", "$((", "))", "A=(", "A+=", "$(", "if",
    "[ $A = 1 ]",
    "then", "else", "fi", "case", "esac", "a)", "while", "done", "&&", TRAIN, "--lr",
])  # fmt: skip


@given(st.lists(PIECES, max_size=40))
def test_any_text_is_read(pieces: list[str]) -> None:
    ShellScript("".join(pieces), {"B": "1"}, ["2"])
    ShellScript(" ".join(pieces), {"B": "1"}, ["2"])


def test_an_open_quote_is_read_at_once() -> None:
    assert command(f'{TRAIN} --lr 1\n"' + '${A:-"b"} $(c) ' * 200) == "--lr 1"

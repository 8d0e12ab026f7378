"""The training command of a script is read as a shell would run it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
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
    ("[[ $D == fp* ]]", "$A"), ("[[ $D != fp* ]]", "$A"), ("[[ $D == 'fp*' ]]", "$A"), ("[ $D = fp* ]", "$A"),
    ('[[ $D == "fp"* ]]', "$A"), ("[[ $D == fp[8] ]]", "$A"), ("[[ $D =~ ^fp ]]", "$A"), ('[ "x$NONE" = "x" ]', "yes"),
    ('[ "a$NONE/$D" != "a/fp8" ]', "no"), ("[ 08 -eq 8 ]", "$A"), ("[[ 08 -eq 8 ]]", "$A"), ("[ $D -eq 8 ]", "$A"),
    ("[ $N -ge 2 ]", "no"), ("[ $N -lt 2 ]", "yes"), ("[ $N -ne 01 ]", "$A"), ("[ $N -ne 1 ]", "no"),
    ("test $D = fp8", "yes"),
    ("[[ $D == fp8 && $N == 2 ]]", "no"), ('[ "$D" = "a b" ]', "no"), ('[ "$(date)" = x ]', "$A"),
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


@pytest.mark.parametrize("changes", [
    "((A*=2))", "((A++))", "let A=A*2", 'let "A *= 2"', "B=$((A=2))", "declare -i A=3", "printf -v A 256",
    "read -r A < x", "while read A; do :; done", "mapfile -t A < x", "for A in 1 2; do :; done", 'eval "A=3"',
    'eval "$(cat x)"', "source ./env.sh", ". env.sh", "[ -f x ] && source env.sh", "[ -f x ] && { B=1; A=2; }",
    "f() { A=2; }; [ -f x ] && f", "f() { [ -f x ] && return; A=2; B=1; }\nf", "if read A; then :; fi",
    "if [ -f x ]; then f() { A=2; }; fi; f", "declare -n A=B", "case $B in (x) A=2;; esac", "[ -f x ] && A+=1",
    "if [ -f x ]; then if [ 1 = 1 ]; then :; fi; A=2; fi", "f() { A=2; }\nA=1; f", "function f {\nA=2\n}\nf",
    "f()\n{\nlocal A=2\n}\nA=3", "[ -f x ] &&\nA=2", "eval echo", "while IFS= read -r A; do :; done",
    "if [ 1 = 2 ]; then :; else if [ 1 = 1 ] && [ -f x ]; then A=2; fi; fi", "declare -i A\nA=3",
    "case $B in done) :;; y) A=2;; esac", ": $((A=2))", "IFS=, read A < x", "(( (A) = 2 ))",
])  # fmt: skip
def test_a_variable_that_a_command_may_set_is_unknown(changes: str) -> None:
    script = ShellScript(f"A=1\n{changes}\n{TRAIN} $A --lr ${{A:-3}}", {})
    assert script.command[2:] == ["$A", "--lr", "$A"] and "A" in script.unknown


@pytest.mark.parametrize("loop", [
    f"for i in 1 2; do {TRAIN} $A $B; A=2; done", f"while true; do\n{TRAIN} $A $B\n((A++)); done",
    f"until [ -f x ]; do for i in 1; do {TRAIN} $A $B; done; read A; done",
    f"for i in 1 2; do {TRAIN} $A $B; if [ -f x ]; then A=2; fi",
])  # fmt: skip
def test_a_variable_that_a_loop_sets_behind_its_use_is_unknown(loop: str) -> None:
    script = ShellScript(f"A=1; B=3\n{loop}", {})
    assert script.command[2:] == ["$A", "3"] and "A" in script.unknown
    assert command(f"A=1; for i in 1 2; do {TRAIN} $A; done; A=2") == "1"


@pytest.mark.parametrize(("text", "words"), [
    ("A=1+1; B=$((A*32))", "1+1 $((A*32))"), ("A=1; B=$((a.b))", "1 $((a.b))"),
    ("A=010; B=$((A*8))", "010 $((A*8))"),
    ("A=1; B=$A\nusage() { echo; C=7; exit 1; }", "1 1"), ("f() { C=$1; }\nA=1; f 3; B=2", "1 2"),
    ("log() {\n echo $1\n}\nA=1; log 5; B=${1:-6}", "1 6"), ("A=1 && B=2", "1 $B"), ("export C A=1; B=2", "1 2"),
    ("set -- 3 4; A=$1; B=$#", "$1 $#"), ("case 1 in (x) : ;; esac; A=1; B=2", "1 2"),
    ("if [ 1 = 1 ]; then A=1; else if [ -f x ]; then A=2; fi; fi; B=2", "1 2"),
    ("set -e; A=1; B=${1:-4}", "1 4"), ("A=1; A=2 B=3 true", "1 $B"),
    ("A=1; cat > x <<EOF\nA=2\nEOF\nB=3", "1 3"), ("A=1; cat <<'E' | tee x\nA=2\nE\nB=3", "1 3"),
    ("A=1; source ~/.bashrc; . venv/bin/activate; B=2", "1 2"), ("source env.sh; A=1; B=${C:-2}", "1 $C"),
    ("A=1; printf '%s' $A; (( A > 0 )); (( A == 2 )); B=2", "1 2"), ("A=1; B=2; echo 'read A' let B=2", "1 2"),
    ("A=1; B=''; if [ $A = 2 ]; then f() { A=3; }; fi; f", "1"), ("typeset A=1; declare -a B=(2)", "1 2"),
])  # fmt: skip
def test_what_is_followed(text: str, words: str) -> None:
    assert command(f"{text}\n{TRAIN} $A $B") == words


@pytest.mark.parametrize(("begins", "words"), [
    ("sbatch <<EOF", "--a 1 --b $B"), ("bash -s <<'EOF'", ""), ("cat <<EOF", ""),
])  # fmt: skip
def test_a_training_command_in_a_heredoc(begins: str, words: str) -> None:
    assert command(f"A=1; B=2\n{begins}\nB=3\n{TRAIN} --a $A --b $B\nEOF\n") == words


def test_a_function_that_trains() -> None:
    """What its caller may set is unknown."""
    script = ShellScript(f"A=1; run() {{ {TRAIN} --lr $1 --x $A $((A+1)) --bf16; }}\nA=2; run 3e-4", {}, ["7"])
    assert script.command[2:] == ["--lr", "$1", "--x", "$A", "$((A+1))", "--bf16"]
    assert script.unknown["1"] == "the caller of a function"


def test_options_of_a_script_that_are_not_given() -> None:
    script = f"A=1\nwhile [[ $# -gt 0 ]]; do\n  case $1 in\n  --a) A=$2; shift 2 ;;\n  esac\ndone\n{TRAIN} $A"
    assert command(script) == "1"
    assert command(script, "--a", "2") == "$A"


def test_all_words_behind_a_script() -> None:
    assert command(f'{TRAIN} "$@" --lr 1') == command(f"{TRAIN} $* --lr 1") == "--lr 1"
    assert ShellScript(f'{TRAIN} "$@"', {}, ["--save", "a b"]).command[-2:] == ["--save", "a b"]
    assert command(f'N=$1; shift\n{TRAIN} --x $N "$@" $1', "8", "--bf16") == "--x 8 $@ $1"


def test_what_may_set_a_variable_is_told_with_its_line() -> None:
    script = ShellScript(
        f'A="1 \\\n 2"\ncat <<EOF\nA=3\nEOF\nif true; then # why\n  read \\\n    A\nfi\n{TRAIN} $A', {}
    )
    assert script.unknown["A"] == "`read A` of line 7"


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


STATEMENTS = st.sampled_from([
    "A=1", "B=$A", "A+=3", "if [ $A = 1 ]; then\nA=5\nelif [ -n \"$B\" ]; then B=4; else B=6; fi", "f() { A=7; }", "f",
    "for A in 8 9; do :; done", "set -- 4 5", "A=$1", "case $A in (1) B=2;; 13|*) A=3;; esac", "[ $A = 2 ] && B=4",
    "[ $A = 2 ] &&\n\nB=4", "C=$((A + 2 * 3))", "(A=4)", "{ A=6; }", "A=9 true $A", "shift", "unset A", "((A++))",
    "printf -v A 3", "read A <<< 5", "B=${A:-3}", ": ${C:=4}", "while [ $A = 9 ]; do A=1; done", "export B=8 C A=2",
    "eval 'A=5'", "x=(1 2); A=${x[@]}", "cat <<E\nA=4\nE", "function g {\nB=1\nlocal A=3\n}", "g", "declare -i B=1+1",
    "if true; then A=2; fi", "true || A=3", "A=1 || B=2", "if [ $A = 1 ] && [ $B = 1 ]; then C=1; fi", "let C=3",
    "if [ $A = 1 ]; then if [ $B = 1 ]; then C=2; fi; A=4; else if [ $C = 3 ]; then B=3; fi; fi", "A=a#b # A=3",
    "B='$A'", "B=\"$A x\"", "echo \\\nA=7", "for ((A=0;A<2;A++)); do B=$A; done", "time A=2",
    "until true; do A=1; done",
    "for i in 1 2; do if [ $A = 2 ]; then B=3; elif [ $A = 1 ]; then C=9; fi; A=2; done", "C=1; f",
    "f() { if [ -n \"$C\" ]; then A=2; fi; }", "g() {\nif true; then\nwhile [ $A = 1 ]; do A=2; done\nfi; B=2\n}",
    "f() {\nif [ $1 = 2 ]; then\nB=5\nreturn\nfi\nC=6\n}", "f 2", "while read B; do A=1; done <<< 2", "a=1; A=${a:+4}",
])  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(st.lists(STATEMENTS, min_size=2, max_size=7))
def test_what_is_known_is_what_a_shell_says(statements: list[str]) -> None:
    text = "\n".join([*statements, f'{TRAIN} "$A" "$B" "$C" "$1"'])
    program = "torchrun() { shift; printf 'train'; printf '\\n%s' \"$@\"; }\n"
    done = subprocess.run(["bash", "-c", program + text, "bash", "w"], capture_output=True, text=True, check=False)
    _, trained, said = done.stdout.rpartition("train\n")
    assume(trained)  # no statement has ended the shell
    for word, expected in zip(ShellScript(text, {}, ["w"]).command[2:], said.split("\n"), strict=True):
        assert "$" in word or word == expected


def test_an_open_quote_is_read_at_once() -> None:
    assert command(f'{TRAIN} --lr 1\n"' + '${A:-"b"} $(c) ' * 200) == "--lr 1"

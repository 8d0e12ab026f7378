"""The training command of a shell script, read without a shell.

Followed are assignments, arrays, `+=`, `${NAME:-default}`, `:=`, `$((...))` of integers, and conditions on text.
Unknown is what a loop, a `case`, a branch of another condition, `shift`, `unset` or an assignment to an element
changes: it stays in words as `$NAME`.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import math
import operator
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

PROGRAM = re.compile(r"(.*/)?(pretrain_\w+\.py|torchtitan[./]train(\.py)?)")

_NESTED = r"(?:[^()]|\([^()]*\))*+"
_COMMAND = rf"\$\((?:[^()]|\({_NESTED}\))*+\)|`[^`]*`"
_BRACED = r"\$\{(?:\"[^\"]*\"|[^}\"])*+\}"
_DOUBLE = rf"\"(?:\\.|{_COMMAND}|{_BRACED}|[^\"\\])*+\""
_TOKEN = re.compile(
    rf"(?P<word>(?:\\.|'[^']*'|{_DOUBLE}|{_COMMAND}|{_BRACED}|[^\s;&|()'\"`\\#]|(?<=[^\s;&|()])#)++)"
    r"|(?P<end>\n|;|&&|\|\||&|\|)|(?P<bracket>[()])|(?:#[^\n]*)|.",
    re.DOTALL,
)
_PART = re.compile(
    rf"\\(?P<escaped>.)|'(?P<single>[^']*)'|(?P<double>{_DOUBLE})|\$\(\((?P<sum>{_NESTED})\)\)|(?P<command>{_COMMAND})"
    rf"|(?P<braced>{_BRACED})|\$(?P<name>\w+|[@*])",
    re.DOTALL,
)
_PARAMETER = re.compile(r"(?P<name>\w+|[@*])(\[[@*]\])?(:?(?P<operator>[-=+?])(?P<word>.*))?", re.DOTALL)
_ASSIGNMENT = re.compile(r"(\w+)(?:\[[^]]*\])?(\+?)=(.*)", re.DOTALL)
_COMMENT_OR_JOINT = re.compile(r"((?<![^\s;&|()])#[^\n]*)|\\\n")  # a backslash at a comment's end joins nothing
_PREFIXES = ("then", "do", "{", "}", "export", "local", "readonly", "declare")
_CONDITIONS = (["if"], ["elif"], ["while"])
_NAMES_ALONE = ("if", "elif", "while", "[", "[[", "test", "echo", "printf")  # begin statements that run no argument
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: lambda a, b: int(a / b),
    ast.Mod: lambda a, b: int(math.fmod(a, b)),
}  # fmt: skip
_NO_INTEGER = (SyntaxError, LookupError, ArithmeticError, ValueError, AttributeError, RecursionError)
_OPENS, _CLOSES = ("if", "for", "while", "until", "case"), ("fi", "done", "esac")


class ShellScript:
    """A script. `commands`: its training commands, by their words from the program on; `environment`: variables before
    it; `arguments`: the words behind its name, `$1` and on.
    """

    def __init__(self, text: str, environment: Mapping[str, str], arguments: Sequence[str] = ()) -> None:
        numbered = {str(number): word for number, word in enumerate(arguments, 1)}
        self._variables: dict[str, list[str] | None] = {
            name: [one] for name, one in {**environment, **numbered}.items()
        }
        self._variables |= {"@": list(arguments), "*": list(arguments)}
        self._branches: list[tuple[bool | None, bool | None]] = []  # of open blocks: followed; one was followed before
        self.commands: dict[tuple[str, ...], list[str]] = {}
        self._assigned: list[str] = []  # a command in a variable
        statement: list[str] = []
        before, depth = "\n", 0
        text = _COMMENT_OR_JOINT.sub(r"\1 ", text).replace("$#", str(len(arguments)))
        for token in _TOKEN.finditer(text + "\n"):
            word, kind = token[0], token.lastgroup
            depth = max(0, depth + {"(": 1, ")": -1}.get(word, 0))
            if kind == "end" and depth == 0 and not (word in ("&&", "||") and statement[:1] in _CONDITIONS):
                self._run(statement, known=before not in ("&&", "||"))
                statement, before, depth = [], word, 0
            elif kind and word != "\n":
                statement.append(word)

    @property
    def command(self) -> list[str]:
        """The last training command, which may be in a variable alone."""
        return [self._assigned, *self.commands.values()][-1]

    def expand(self, text: str, *, quoted: bool = False) -> list[str]:
        """Return what a word becomes: several words for an array, or for text with spaces that is not `quoted`."""
        words, at = [""], 0
        for part in _PART.finditer(text):
            words[-1] += text[at : part.start()]
            at = part.end()
            if part["escaped"] or (part["single"] is not None and not quoted):
                words[-1] += part["escaped"] or part["single"]
                continue
            values = self.expand(part["double"][1:-1], quoted=True) if part["double"] else self._values(part)
            if not (quoted or part["double"]):
                values = re.findall(rf"(?:{_COMMAND}|\S)+", " ".join(values))
            words[-1] += "".join(values[:1])
            words += values[1:]
        words[-1] += text[at:]
        return words if words != [""] or quoted or "'" in text or ('"' in text and "@" not in text) else []

    def _values(self, part: re.Match[str]) -> list[str]:
        """Return the values of an expansion; what is unknown stays."""
        if part["sum"]:
            names = re.sub(
                r"\$?\{?([A-Za-z_]\w*)\}?", lambda name: "".join(self._variables.get(name[1]) or []), part["sum"]
            )
            with contextlib.suppress(*_NO_INTEGER):
                return [str(_integer(ast.parse(names.strip(), mode="eval").body))]
        given = _PARAMETER.fullmatch(part["name"] or (part["braced"] or "")[2:-1])
        if not given:
            return [part[0]]
        name, values, kind = given["name"], self._variables.get(given["name"]), given["operator"]
        if values is None and (kind in (None, "?") or name in self._variables):
            return [f"${name}"]
        if kind in (None, "?") or (kind == "+") != bool(values and any(values)):
            return values or []
        words = self.expand(given["word"])
        if kind == "=":
            self._variables[name] = None if self._branches else words
        return words

    def _run(self, statement: list[str], *, known: bool) -> None:
        """Follow a statement; `known`: it does not depend on the one before."""
        first = statement[0] if statement else ""
        if first in _OPENS:
            holds = self._test(statement[1:]) if first in ("if", "while") else None
            holds = None if holds and first == "while" else holds
            self._branches.append((holds, holds))
        elif first in ("elif", "else") and self._branches:
            done = self._branches.pop()[1]
            holds = True if first == "else" else self._test(statement[1:])
            unknown = done is None or holds is None
            self._branches.append((None, None) if unknown else (holds and not done, holds or done))
        elif first in _CLOSES and self._branches:
            self._branches.pop()
        followed = [branch for branch, _ in self._branches]
        if ")" in statement and "(" not in statement[: statement.index(")")]:  # a pattern of a case
            statement = statement[statement.index(")") + 1 :]
        while statement and statement[0] in (*_PREFIXES, "else"):
            statement = statement[1:]
        if False in followed:
            return
        if first in ("unset", "shift"):
            names = statement[1:] if first == "unset" else [one for one in self._variables if not one.isidentifier()]
            self._variables |= dict.fromkeys(names)
        while statement and (assigned := _ASSIGNMENT.match(statement[0])):
            array = not assigned[3] and statement[1:2] == ["("] and ")" in statement
            end = statement.index(")") + 1 if array else 1
            whole = known and None not in followed and "[" not in assigned[0].partition("=")[0]
            self._assign(assigned, statement[2 : end - 1] if array else None, whole)
            statement = statement[end:]
        command = _training([word for text in statement for word in self.expand(text)])
        if command and command[0] not in _NAMES_ALONE:
            self.commands.setdefault(tuple(itertools.dropwhile(_is_no_program, command)), command)

    def _assign(self, assigned: re.Match[str], array: list[str] | None, known: bool) -> None:
        name, adds, text = assigned.groups()
        before = (self._variables.get(name) or []) if adds else []
        if array is None:
            values = ["".join([*before, " ".join(self.expand(text, quoted=text[:1] not in ("'", '"')))])]
        else:
            values = [*before, *(word for one in array for word in self.expand(one))]
        self._variables[name] = values if known else None
        self._assigned = _training(values) or self._assigned

    def _test(self, words: list[str]) -> bool | None:
        """Return the value of a condition, None if it is not known. A variable without a value is empty."""
        results, text = [], " ".join(word for word in words if word not in ("[", "]", "[[", "]]"))
        for condition in re.split(r" && | \|\| ", text):
            negated, *given = condition.split(" ") if condition.startswith("! ") else ["", *condition.split(" ")]
            values = [re.sub(r"^\$\w+$", "", " ".join(self.expand(word, quoted=word[:1] == "$"))) for word in given]
            unknown = any(
                name in self._variables and self._variables[name] is None for name in re.findall(r"\w+", condition)
            )
            if len(values) == 2 and values[0] in ("-z", "-n"):
                holds = (values[1] == "") == (values[0] == "-z")
            elif values[1:] == ["-gt", "0"] and values[0].isdecimal():
                holds = int(values[0]) > 0
            elif len(values) == 3 and values[1] in ("=", "==", "-eq", "!=", "-ne"):
                holds = (values[0] == values[2]) == (values[1] in ("=", "==", "-eq"))
            else:
                unknown = True
            results.append(None if unknown else holds != bool(negated))
        if None in results or (" && " in text and " || " in text):
            return None
        return any(results) if " || " in text else all(results)


def _training(words: list[str]) -> list[str]:
    """Return the words if they are a training command, also one in quotes, such as that of `bash -c`."""
    split = [one for word in words for one in (split_words(word) if "train" in word and " " in word else [word])]
    ends = next((number for number, word in enumerate(split) if re.match(r"\d*[<>]", word)), len(split))
    return split[:ends] if any(map(PROGRAM.fullmatch, split[: ends - 1])) else []


def _is_no_program(word: str) -> bool:
    return not PROGRAM.fullmatch(word)


def _integer(node: Any) -> int:
    """Return the value of an expression. Raises: one of _NO_INTEGER for one that is not of integers"""
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_integer(node.left), _integer(node.right))
    return int(node.value)


def split_words(text: str) -> list[str]:
    """Return the words of a command line, by spaces alone if its quotes do not match."""
    try:
        return shlex.split(_COMMENT_OR_JOINT.sub(r"\1 ", text), comments=True)
    except ValueError:
        return text.split()

"""The training command of a shell script, read without a shell.

Followed are assignments, arrays, `+=`, `${NAME:-default}`, `:=`, `$((...))` of integers, and conditions on text and
integers. What any other statement may set is unknown, and so is what is set in a block that may not run: a loop, a
`case`, a function, or a branch of a condition that is not followed. It stays in words as `$NAME`.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import math
import operator
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

PROGRAM = re.compile(r"(.*/)?(pretrain_\w+\.py|torchtitan[./]train(\.py)?)")

_NESTED = r"(?:[^()]|\([^()]*\))*+"
_COMMAND = rf"\$\((?:[^()]|\({_NESTED}\))*+\)|`[^`]*`"
_BRACED = r"\$\{(?:\"[^\"]*\"|[^}\"])*+\}"
_DOUBLE = rf"\"(?:\\.|{_COMMAND}|{_BRACED}|[^\"\\])*+\""
_TOKEN = re.compile(
    rf"\\\n|(?P<word>(?:\\[^\n]|'[^']*'|{_DOUBLE}|{_COMMAND}|{_BRACED}|[^\s;&|()'\"`\\#]|(?<=[^\s;&|()])#)++)"
    r"|(?P<end>\n|;|&&|\|\||&|\|)|(?P<bracket>[()])|(?:#[^\n]*)|.",
    re.DOTALL,
)
_PART = re.compile(
    rf"\\(?P<escaped>.)|'(?P<single>[^']*)'|(?P<double>{_DOUBLE})|\$\(\((?P<sum>{_NESTED})\)\)|(?P<command>{_COMMAND})"
    rf"|(?P<braced>{_BRACED})|\$(?P<name>\w+|[@*#])",
    re.DOTALL,
)
_PARAMETER = re.compile(r"(?P<name>\w+|[@*#])(\[[@*]\])?(:?(?P<operator>[-=+?])(?P<word>.*))?", re.DOTALL)
_ASSIGNMENT = re.compile(r"(\w+)(\[[^]]*\])?(\+?)=(.*)", re.DOTALL)
_HEREDOC = re.compile(
    r"^(?P<line>[^\n]*?)(?<!<)<<-?[ \t]*(?P<quote>['\"\\]?)(?P<end>\w+)['\"]?(?P<rest>[^\n]*)\n"
    r"(?P<body>(?:[^\n]*\n)*?)[ \t]*(?P=end)[ \t]*$",
    re.MULTILINE,
)
_NAME = re.compile(r"(?<![$\w{])[A-Za-z_]\w*")  # that stands alone
_SUM = re.compile(r"\( ?\((.*?)\) ?\)", re.DOTALL)
_SETS = re.compile(r"\+\+|--|(?<![=<>!])=(?!=)|<<=|>>=")
_FUNCTION = re.compile(r"function [\w-]+( \( \))?|[\w-]+ \( \)")
_NO_SETTINGS = re.compile(r"(^|[/. ])(activate|bashrc|bash_profile|profile|conda|micromamba|module|modules|spack)\b")
_SETTERS = ("read", "mapfile", "readarray", "getopts", "unset", "for", "select", "let")
_DECLARATIONS = ("export", "local", "readonly", "declare", "typeset")
_PREFIXES = ("then", "do", "!", "time", "command", "builtin")
_CONDITIONS = (["if"], ["elif"], ["while"], ["until"])
_LOOPS = ("for", "while", "until", "select")
_OPENS, _ALONE = ("if", *_LOOPS, "case", "{", "function"), ("else", "fi", "done", "esac", "}")
_NAMES_ALONE = ("[", "[[", "test", "echo", "printf", *_OPENS)  # begin statements that run no argument
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: lambda a, b: int(a / b),
    ast.Mod: lambda a, b: int(math.fmod(a, b)),
}  # fmt: skip
_NO_INTEGER = (SyntaxError, LookupError, ArithmeticError, TypeError, ValueError, AttributeError, RecursionError)
_COMPARISONS = {f"-{name}": getattr(operator, name) for name in ("eq", "ne", "gt", "ge", "lt", "le")}


class _Statement(NamedTuple):
    """The `words` of a statement that begins in a `line`. `sure`: without `&&` or `||` before."""

    words: list[str]
    line: int
    sure: bool

    def __str__(self) -> str:
        text = " ".join(" ".join(self.words).split())
        return f"`{text if len(text) <= 60 else f'{text[:57]}...'}` of line {self.line}"


class _Block(NamedTuple):
    """An open block. `followed`: None if unknown; `done`: a branch before it, or it, is followed."""

    keyword: str
    followed: bool | None
    done: bool | None


class ShellScript:
    """A script. `commands`: its training commands, by their words from the program on; `unknown`: the statement of an
    unknown variable, by name; `environment`: variables before it; `arguments`: the words behind its name, `$1` and on.
    """

    def __init__(self, text: str, environment: Mapping[str, str], arguments: Sequence[str] = ()) -> None:
        numbered = {str(number): [word] for number, word in enumerate(arguments, 1)}
        self._variables: dict[str, list[str] | None] = {name: [one] for name, one in environment.items()}
        self._variables |= {**numbered, "@": list(arguments), "*": list(arguments), "#": [str(len(arguments))]}
        self._mentioned = set(re.findall(r"\$\{?([A-Za-z_]\w*)", text))
        self._blocks: list[_Block] = []
        self._never = set[str]()  # variables with other values than those assigned: integers, and those of functions
        self._looped = list[list[str]]()  # commands of an open loop, which may set their variables behind them
        self.unknown: dict[str, str] = {}
        self.commands: dict[tuple[str, ...], list[str]] = {}
        for statement in _statements(_HEREDOC.sub(_heredoc, text)):
            self._follow(statement)
        self._train(self._looped)

    @property
    def command(self) -> list[str]:
        """The last training command."""
        return [[], *self.commands.values()][-1]

    def expand(self, text: str, *, quoted: bool = False) -> list[str]:
        """Return what a word becomes: several words for an array, or for text with spaces without quotes."""
        words, at = [""], 0
        for part in _PART.finditer(text):
            words[-1] += text[at : part.start()]
            at = part.end()
            if part["escaped"] or (part["single"] is not None and not quoted):
                words[-1] += (part["escaped"] or "").replace("\n", " ") + (part["single"] or "")
                continue
            values = self.expand(part["double"][1:-1], quoted=True) if part["double"] else self._values(part)
            if not (quoted or part["double"]):
                values = re.findall(rf"(?:{_COMMAND}|\S)+", " ".join(values))
            words[-1] += "".join(values[:1])
            words += values[1:]
        words[-1] += text[at:]
        return words if words != [""] or quoted or "'" in text or ('"' in text and "@" not in text) else []

    def _values(self, part: re.Match[str]) -> list[str]:
        """Return the values of an expansion; what is unknown stays, and in a function all that its caller may set."""
        given = _PARAMETER.fullmatch(part["name"] or (part["braced"] or "")[2:-1])
        if self._is_in("function"):
            if given:
                self.unknown.setdefault(given["name"], "the caller of a function")
            return [f"${given['name']}" if given else part[0]]
        if part["sum"]:
            integers = {name: one[0] for name, one in self._variables.items() if one and one[0].isdecimal()}
            variable = r"\$?(\{)?([A-Za-z_]\w*)(?(1)\})"
            numbers = re.sub(variable, lambda name: integers.get(name[2], name[0]), part["sum"])
            with contextlib.suppress(*_NO_INTEGER):
                return [str(_integer(ast.parse(numbers.strip(), mode="eval").body))]
        if not given:
            return [part[0]]
        name, values, kind = given["name"], self._variables.get(given["name"]), given["operator"]
        if values is None and (kind in (None, "?") or name in self._variables):
            return [f"${name}"]
        if kind in (None, "?") or (kind == "+") != bool(values and any(values)):
            return values or []
        words = self.expand(given["word"])
        if kind == "=":
            self._variables[name] = None if self._blocks else words
        return words

    def _follow(self, statement: _Statement) -> None:
        words, _, sure = statement
        if words[0] in (*_OPENS, *_ALONE, "elif"):
            self._block(words[0], words[1:], sure=sure)
        followed = {block.followed for block in self._blocks}
        if False in followed:
            return
        sure = sure and None not in followed
        assignments, command = self._assignments(words)
        self._forget(self._may_set(" ".join(words), command), statement)
        for assigned, array in [] if command else assignments:
            self._assign(assigned, array, statement, sure=sure and not assigned[2])
        if self._is_in(*_LOOPS) and not self._is_in("function"):
            self._looped.append(command)
        else:
            self._train([command])

    def _is_in(self, *keywords: str) -> int:
        """Return the number of open blocks of the keywords."""
        return sum(block.keyword in keywords for block in self._blocks)

    def _train(self, commands: Iterable[list[str]]) -> None:
        for command in commands:
            training = _training([word for text in command for word in self.expand(text)])
            if training and training[0] not in _NAMES_ALONE:
                program = itertools.dropwhile(lambda word: not PROGRAM.fullmatch(word), training)
                self.commands.setdefault(tuple(program), training)

    def _block(self, keyword: str, condition: list[str], *, sure: bool) -> None:
        """Open, change or close a block."""
        if keyword in _OPENS:
            holds = self._test(condition) if keyword in ("if", "while") else (sure or None) if keyword == "{" else None
            holds = None if holds and keyword == "while" else holds
            self._blocks.append(_Block(keyword, holds, holds))
        elif self._blocks:
            if keyword == "done" and self._is_in(*_LOOPS) == 1:
                self._train(self._looped)
                self._looped.clear()
            block = self._blocks.pop()
            if keyword in ("elif", "else"):
                holds = True if keyword == "else" else self._test(condition)
                unknown = block.done is None or holds is None
                followed, done = (None, None) if unknown else (holds and not block.done, holds or block.done)
                self._blocks.append(_Block(keyword, followed, done))

    def _assignments(self, words: list[str]) -> tuple[list[tuple[re.Match[str], list[str] | None]], list[str]]:
        """Return the assignments of a statement with the words of arrays, and the command behind them. Variables with
        attributes such as -i are not what is assigned.
        """
        found = list[tuple[re.Match[str], list[str] | None]]()
        declares, unusual = words[0] in _DECLARATIONS, False
        words = words[1:] if declares or words[:1] in _CONDITIONS else words
        while words:
            if assigned := _ASSIGNMENT.match(words[0]):
                array = not assigned[4] and words[1:2] == ["("] and ")" in words
                end = words.index(")") + 1 if array else 1
                found.append((assigned, words[2 : end - 1] if array else None))
                words = words[end:]
            elif declares or words[0] in _PREFIXES:
                unusual |= words[0].startswith("-") and not set(words[0]) <= set("-axrgf")
                self._never |= {words[0]} if unusual else set()
                words = words[1:]
            else:
                break
        self._never |= {assigned[1] for assigned, _ in found} if unusual else set()
        return found, words

    def _may_set(self, text: str, command: list[str]) -> set[str]:
        """Return the variables that a statement may set otherwise than by assignment."""
        names = {name for one in _SUM.findall(text) if _SETS.search(one) for name in _NAME.findall(one)}
        first = command[0] if command else ""
        if first in _SETTERS or command[:2] == ["printf", "-v"]:
            names |= set(_NAME.findall(text))
        if first == "shift" or command[:2] == ["set", "--"]:
            names |= {name for name in self._variables if not name.isidentifier()}
        if first in ("source", ".", "eval"):
            words = [one for word in command[1:] for one in self.expand(word)]
            if not _training(words) and not _NO_SETTINGS.search(" ".join(words)):
                names |= self._mentioned | {name for name in self._variables if name.isidentifier()}
        return names

    def _forget(self, names: Iterable[str], statement: _Statement) -> None:
        """Make variables unknown, by a statement."""
        for name in names:
            self._variables[name] = None
            self.unknown[name] = str(statement)
        if self._is_in("function"):
            self._never |= set(names)

    def _assign(self, assigned: re.Match[str], array: list[str] | None, statement: _Statement, *, sure: bool) -> None:
        name, _, adds, text = assigned.groups()
        values = self._variables.get(name, [])
        before = ([f"${name}"] if values is None else values) if adds else []
        if array is None:
            values = ["".join([*before, " ".join(self.expand(text, quoted=text[:1] not in ("'", '"')))])]
        else:
            values = [*before, *(word for one in array for word in self.expand(one))]
        if sure and name not in self._never:
            self._variables[name] = values
        else:
            self._forget([name], statement)

    def _test(self, words: list[str]) -> bool | None:
        """Return the value of a condition, None if unknown, as in a block run later, or again."""
        if any(block.followed is None for block in self._blocks):
            return None
        results, joints = list[bool | None](), {word for word in words if word in ("&&", "||")}
        plain = [word for word in words if word not in ("[", "]", "[[", "]]", "test")]
        for joins, group in itertools.groupby(plain, lambda word: word in ("&&", "||")):
            if not joins:
                given = list(group)
                negated = given[:1] == ["!"]
                holds = self._compare(given[negated:])
                results.append(None if holds is None else holds != negated)
        if None in results or not results or len(joints) > 1:
            return None
        return any(results) if "||" in joints else all(results)

    def _compare(self, given: list[str]) -> bool | None:
        """Return the value of a comparison, None if unknown, or if it is of files or patterns."""

        def or_empty(name: re.Match[str]) -> str:
            return name[0] if name[2] in self._variables else ""

        words = [word if "'" in word else re.sub(r"\$(\{)?(\w+)(?(1)\})", or_empty, word) for word in given]
        values = [" ".join(self.expand(word, quoted=word[:1] == "$")) for word in words]
        if re.search(r"[$`]", "".join(values)):
            return None
        if len(values) == 2 and values[0] in ("-z", "-n"):
            return (values[1] == "") == (values[0] == "-z")
        if len(values) != 3:
            return None
        first, sign, second = values
        if compare := _COMPARISONS.get(sign):
            integers = all(re.fullmatch(r"-?(0|[1-9][0-9]*)", one) for one in (first, second))
            return compare(int(first), int(second)) if integers else None
        if sign not in ("=", "==", "!=") or re.search(r"[][*?\\()]", second + given[2]):
            return None
        return (first == second) == (sign != "!=")


def _heredoc(found: re.Match[str]) -> str:
    """Return the lines of a heredoc without its text, or with it as a block if a shell runs it with our variables."""
    line, body = f"{found['line']} {found['rest']}", found["body"]
    if found["quote"] or not re.search(r"(?<!\S)(bash|sh|sbatch|srun|qsub)\b", found["line"]):
        return line + "\n" * (body.count("\n") + 1)
    return f"{line}; while heredoc\n{body}done"


def _statements(text: str) -> Iterator[_Statement]:
    """Yield the statements of a script; a keyword of a block, and a pattern of a `case`, is one of its own."""
    words, sure, depth, line, first = list[str](), True, 0, 1, 1
    for token in _TOKEN.finditer(text + "\n"):
        word, kind, defines = token[0], token.lastgroup, bool(_FUNCTION.fullmatch(" ".join(words[:5])))
        alone = depth == 0 and (word == "{" or (not words and word in _ALONE and text[token.end() :][:1] != ")"))
        ends = kind == "end" and depth == 0 and not (word in ("&&", "||") and words[:1] in _CONDITIONS)
        bracket = word == ")" and (depth == 0 or (depth == 1 and words[:1] in (["("], ["case"])))
        words += [word] * bracket
        if alone or bracket or (ends and not (word == "\n" and (defines or not words))):
            if words and not (alone and defines):
                yield _Statement(words, first, sure)
            if alone:
                yield _Statement(["function" if defines else word], line, sure)
            words, sure, depth = [], word not in ("&&", "||"), 0
        elif kind and word != "\n" and (words or word not in _PREFIXES):
            first = first if words else line
            depth = max(0, depth + {"(": 1, ")": -1}.get(word, 0))
            words.append(word)
        line += word.count("\n")


def _training(words: list[str]) -> list[str]:
    """Return the words if they are a training command, also one in quotes, such as that of `bash -c`."""
    split = [one for word in words for one in (split_words(word) if "train" in word and " " in word else [word])]
    ends = next((number for number, word in enumerate(split) if re.match(r"\d*[<>]", word)), len(split))
    return split[:ends] if any(map(PROGRAM.fullmatch, split[: ends - 1])) else []


def _integer(node: Any) -> int:
    """Return the value of an expression. Raises: one of _NO_INTEGER for one that is not of integers"""
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_integer(node.left), _integer(node.right))
    return int(node.value)


def split_words(text: str) -> list[str]:
    """Return the words of a command line, by spaces alone if its quotes do not match."""
    try:  # a backslash at a comment's end joins nothing
        return shlex.split(re.sub(r"((?<![^\s;&|()])#[^\n]*)|\\\n", r"\1 ", text), comments=True)
    except ValueError:
        return text.split()

"""The training command of a shell script, read without a shell.

Followed are assignments, arrays, `+=`, `${NAME:-default}`, `:=`, `$((...))` of integers, conditions on text and
integers, functions, and `set --`. Unknown is what a loop, a `case`, a branch of another condition, an assignment to an
element, or a command such as `read`, `let`, `eval` or `source` may set: it stays in words as `$NAME`. The text of a
heredoc runs in a shell or sbatch alone.
"""

from __future__ import annotations

import ast
import contextlib
import fnmatch
import itertools
import math
import operator
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    rf"|(?P<braced>{_BRACED})|\$(?P<name>\w+|[@*#])",
    re.DOTALL,
)
_PARAMETER = re.compile(r"(?P<name>\w+|[@*#])(\[[@*]\])?(:?(?P<operator>[-=+?])(?P<word>.*))?", re.DOTALL)
_ASSIGNMENT = re.compile(r"(\w+)(?:\[[^]]*\])?(\+?)=(.*)", re.DOTALL)
_COMMENT_OR_JOINT = re.compile(r"((?<![^\s;&|()])#[^\n]*)|\\\n")  # a backslash at a comment's end joins nothing
_HEREDOC = re.compile(
    r"^(?P<line>(?P<first>[^\n]*?(?<!\S)(?:bash|sh|sbatch|srun|qsub)\b|)[^\n]*)(?<!<)<<-?[ \t]*(?P<quote>['\"\\]?)"
    r"(?P<end>\w+)(?P<rest>[^\n]*)\n(?P<body>(?:[^\n]*\n)*?)[ \t]*(?P=end)[ \t]*$",
    re.MULTILINE,
)
_REFERENCE = re.compile(r"\$\{?(\w+|[@*#])")
_SETS = re.compile(r"(?:\+\+|--)\s*([A-Za-z_]\w*)|([A-Za-z_]\w*)\s*(?:\+\+|--|(?:[-+*/%&|^]|<<|>>)?=(?!=))")
_NO_SETTINGS = re.compile(r"(^|[/. ])(activate|bashrc|bash_profile|profile|conda|micromamba|module|modules|spack)\b")
_READERS = ("read", "mapfile", "readarray", "getopts", "unset", "for", "select")  # of names as they are
_DECLARATIONS = ("export", "local", "readonly", "declare", "typeset")
_KEYWORDS = ("then", "do", "{", "}", "else", "fi", "done", "esac", "!", "time", "command", "builtin")
_CONDITIONS = (["if"], ["elif"], ["while"], ["until"])
_NAMES_ALONE = ("[", "[[", "test", "echo", "printf")  # begin statements that run no argument
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: lambda a, b: int(a / b),
    ast.Mod: lambda a, b: int(math.fmod(a, b)),
}  # fmt: skip
_NO_INTEGER = (SyntaxError, LookupError, ArithmeticError, ValueError, AttributeError, RecursionError)
_OPENS, _CLOSES = ("if", "for", "while", "until", "case", "select", "{"), ("fi", "done", "esac", "}")
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-gt": operator.gt, "-ge": operator.ge, "-lt": operator.lt,
    "-le": operator.le,
}  # fmt: skip

Statement = tuple[list[str], bool]
"""Words, and True for a statement without `&&` or `||` before."""


class ShellScript:
    """A script. `commands`: its training commands, by their words from the program on; `unknown`: the statement of an
    unknown variable, by name; `environment`: variables before it; `arguments`: the words behind its name, `$1` and on.
    """

    def __init__(self, text: str, environment: Mapping[str, str], arguments: Sequence[str] = ()) -> None:
        self._variables: dict[str, list[str] | None] = {name: [one] for name, one in environment.items()}
        self._variables |= _numbered(arguments)
        self._mentioned = {name for name in _REFERENCE.findall(text) if name.isidentifier()}
        self._branches: list[tuple[bool | None, bool | None]] = []  # of open blocks: followed; one was followed before
        self._functions: dict[str, list[Statement]] = {}
        self._computed: set[str] = set()  # integers, and others that are not what is assigned
        self.unknown: dict[str, str] = {}
        self.commands: dict[tuple[str, ...], list[str]] = {}
        self._assigned: list[str] = []  # a command in a variable
        self._follow(_statements(_COMMENT_OR_JOINT.sub(r"\1 ", _HEREDOC.sub(_heredoc, text))))

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
            names = re.sub(r"(\$\{?)?([A-Za-z_]\w*)\}?", self._term, part["sum"])
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

    def _term(self, name: re.Match[str]) -> str:
        """Return a variable of a sum: with `$` its text, without it its value."""
        text = "".join((self._variables.get(name[2]) or [])[:1])
        return text if name[1] else f"({text})"

    def _follow(self, statements: Iterable[Statement]) -> None:
        """Follow statements, and keep functions for their calls."""
        rest = iter(statements)
        for words, known in rest:
            statement = words
            if statement[2:4] == ["(", ")"] and statement[0] in _KEYWORDS:
                self._run(words[:1], known=known)
                statement = words[1:]
            named = statement[1:2] if statement[:1] == ["function"] else statement[:1]
            if named == statement[:1] and (statement[1:3] != ["(", ")"] or not re.fullmatch(r"[\w-]+", named[0])):
                self._run(statement, known=known)
                continue
            body = [(statement[statement.index("{") + 1 :], True)] if "{" in statement else []
            depth = len(body)
            for inner, sure in rest:
                depth += (inner[:1] == ["{"]) - (inner[:1] == ["}"])
                if depth <= 0:
                    break
                body.append((inner, sure))
            followed = {branch for branch, _ in self._branches}
            if None in followed or any("return" in inner for inner, _ in body[:-1]):
                body.insert(0, (["while"], True))  # may not run, or end before
            if False not in followed:
                self._functions |= dict.fromkeys(named, body)

    def _call(self, name: str, arguments: list[str], *, known: bool) -> None:
        """Follow a function, which has its own arguments and local variables."""
        body, before, blocks = self._functions.pop(name), dict(self._variables), len(self._branches)
        declared = [words[1:] for words, _ in body if words[:1] in (["local"], ["declare"], ["typeset"])]
        own = {word.partition("=")[0].rstrip("+") for words in declared for word in words}
        self._branches.append((known or None, known or None))
        self._variables |= dict.fromkeys(one for one in self._variables if not one.isidentifier())
        self._variables |= _numbered(arguments)
        self._follow(body)
        del self._branches[blocks:]
        own |= {one for one in (*before, *self._variables) if not one.isidentifier()}
        self._variables = {one: values for one, values in self._variables.items() if one not in own}
        self._variables |= {one: before[one] for one in own if one in before}
        self._functions[name] = body

    def _run(self, statement: list[str], *, known: bool) -> None:
        """Follow a statement; `known`: without `&&` or `||` before."""
        command, condition = self._enter(statement, known=known)
        followed = [branch for branch, _ in self._branches]
        if False in followed:
            return
        self._forget(_set_in_sums(re.findall(r"\( ?\((.*?)\) ?\)", " ".join(command))), statement)
        sure, words, before = known and None not in followed, self._declare(command), dict(self._variables)
        at_first = words
        while words and (assigned := _ASSIGNMENT.match(words[0])):
            array = not assigned[3] and words[1:2] == ["("] and ")" in words
            end = words.index(")") + 1 if array else 1
            element = "[" in assigned[0].partition("=")[0]
            self._assign(assigned, words[2 : end - 1] if array else None, sure and not element, statement)
            words = words[end:]
        if not words:
            return
        if at_first is command and words is not command:
            self._variables = before  # assignments are of the command alone
        self._forget(self._changed(words, sure=sure), statement)
        expanded = [word for text in words for word in self.expand(text)]
        if words[0] in self._functions:
            self._call(words[0], expanded[1:], known=sure)
        training = [] if condition else _training(expanded)
        if training and training[0] not in _NAMES_ALONE:
            self.commands.setdefault(tuple(itertools.dropwhile(_is_no_program, training)), training)

    def _enter(self, statement: list[str], *, known: bool) -> tuple[list[str], bool]:
        """Follow the first keywords of a statement. Returns the rest, and True for a condition."""
        condition = False
        while statement:
            word, end = statement[0], statement.index(")") + 1 if ")" in statement else 0
            if word in _KEYWORDS or [word] in _CONDITIONS:
                self._block(word, statement[1:], known=known)
                condition, statement = [word] in _CONDITIONS or (condition and word == "!"), statement[1:]
            elif word in ("for", "select"):
                self._block(word, [], known=known)
                break
            elif word == "case":
                self._block(word, [], known=known)
                statement = statement[end or len(statement) :]
            elif end and ("(" not in statement[:end] or (word == "(" and any(map(_ASSIGNMENT.match, statement[end:])))):
                statement = statement[end:]  # a pattern of a case
            else:
                break
        return statement, condition

    def _declare(self, statement: list[str]) -> list[str]:
        """Return the assignments of a declaration: variables with attributes such as -i are unknown."""
        while statement and statement[0] in _DECLARATIONS:
            rest = list(itertools.dropwhile(lambda word: word.startswith("-"), statement[1:]))
            if set("".join(statement[1 : len(statement) - len(rest)])) - set("-axrgf"):
                self._computed |= {word.partition("=")[0] for word in rest}
            statement = rest
        return statement

    def _block(self, word: str, condition: list[str], *, known: bool) -> None:
        """Open, change or close a block by its keyword."""
        if word in _OPENS:
            holds = self._test(condition) if word in ("if", "while") else known or None if word == "{" else None
            holds = None if holds and word == "while" else holds
            self._branches.append((holds, holds))
        elif word in ("elif", "else") and self._branches:
            done = self._branches.pop()[1]
            holds = True if word == "else" else self._test(condition)
            unknown = done is None or holds is None
            self._branches.append((None, None) if unknown else (holds and not done, holds or done))
        elif word in _CLOSES and self._branches:
            self._branches.pop()

    def _changed(self, statement: list[str], *, sure: bool) -> set[str]:
        """Return the variables of a command such as `read`. A `sure` `set --` is followed."""
        first, *words = statement
        names = _set_in_sums(words) if first == "let" else set[str]()
        if first in _READERS:
            bare = [word.strip("'\"").partition("[")[0] for word in words]
            names |= {word for word in (bare[:1] if first in ("for", "select") else bare) if word.isidentifier()}
        if first == "printf" and words[:1] == ["-v"]:
            names |= set(words[1:2])
        if first == "shift" or statement[:2] == ["set", "--"]:
            names |= {name for name in self._variables if not name.isidentifier()}
        text = " ".join(one for word in words for one in self.expand(word))
        anything = first in ("source", ".") or (first == "eval" and not _training([text]) and re.search(r"[$`]", text))
        if first == "eval":
            names |= set(re.findall(r"([A-Za-z_]\w*)\+?=", text))
        if anything and not _NO_SETTINGS.search(text):
            names |= self._mentioned | {name for name in self._variables if name.isidentifier()}
        if statement[:2] == ["set", "--"] and sure:
            self._forget(names, statement)
            self._variables |= _numbered([one for word in words[1:] for one in self.expand(word)])
            return set()
        return names

    def _forget(self, names: Iterable[str], statement: list[str]) -> None:
        """Make variables unknown, by a statement."""
        text = " ".join(" ".join(statement).split())
        for name in names:
            self._variables[name] = None
            self.unknown[name] = text if len(text) <= 60 else f"{text[:57]}..."

    def _assign(self, assigned: re.Match[str], array: list[str] | None, known: bool, statement: list[str]) -> None:
        name, adds, text = assigned.groups()
        values = self._variables.get(name, [])
        before = ([f"${name}"] if values is None else values) if adds else []
        if array is None:
            values = ["".join([*before, " ".join(self.expand(text, quoted=text[:1] not in ("'", '"')))])]
        else:
            values = [*before, *(word for one in array for word in self.expand(one))]
        if known and name not in self._computed:
            self._variables[name] = values
        else:
            self._forget([name], statement)
        self._assigned = _training(values) or self._assigned

    def _test(self, words: list[str]) -> bool | None:
        """Return the value of a condition, None if unknown. A variable without a value is empty."""
        results, joints = list[bool | None](), {word for word in words if word in ("&&", "||")}
        plain = [word for word in words if word not in ("[", "]", "[[", "]]", "test")]
        for joins, group in itertools.groupby(plain, lambda word: word in ("&&", "||")):
            if not joins:
                given = list(group)
                negated = given[:1] == ["!"]
                holds = self._compare(given[negated:], double="[[" in words)
                results.append(None if holds is None else holds != negated)
        if None in results or not results or len(joints) > 1:
            return None
        return any(results) if "||" in joints else all(results)

    def _compare(self, given: list[str], *, double: bool) -> bool | None:
        """Return the value of a comparison, None if unknown. `double`: in `[[`."""
        values = [" ".join(self.expand(word, quoted=word[:1] == "$")) for word in given]
        unknown = {name for name, known in self._variables.items() if known is None}
        left = set(_REFERENCE.findall(" ".join(values)))
        values = [text if "{" in text else _REFERENCE.sub("", text) for text in values]
        if unknown & set(_REFERENCE.findall(" ".join(given))) or left & self._variables.keys():
            return None
        if re.search(r"[$`]", "".join(values)):
            return None
        if len(values) == 2 and values[0] in ("-z", "-n"):
            return (values[1] == "") == (values[0] == "-z")
        if len(values) != 3:
            return None
        first, sign, second = values
        if compare := _COMPARISONS.get(sign):
            number = re.compile(r"-?(0|[1-9]\d*)" if double else r"-?\d+", re.ASCII)
            return compare(int(first), int(second)) if number.fullmatch(first) and number.fullmatch(second) else None
        if sign not in ("=", "==", "!="):
            return None
        literal = re.fullmatch(r"'[^']*'|\"[^\"]*\"", given[2]) or not re.search(r"[][*?\\()]", second + given[2])
        if not literal and (not double or re.search(r"[][\\()'\"]", second + given[2])):
            return None  # files, or a pattern that is not only of * and ?
        same = first == second if literal else fnmatch.fnmatchcase(first, second)
        return same == (sign != "!=")


def _numbered(arguments: Sequence[str]) -> dict[str, list[str] | None]:
    """Return the variables of arguments: `$1` and on, `$@`, `$*` and `$#`."""
    numbered: dict[str, list[str] | None] = {str(number): [word] for number, word in enumerate(arguments, 1)}
    return numbered | {"@": list(arguments), "*": list(arguments), "#": [str(len(arguments))]}


def _heredoc(found: re.Match[str]) -> str:
    """Return the lines of a heredoc without its text, or with it for a shell, which sets nothing outside."""
    line = f"{found['line']} {found['rest'].lstrip(chr(39) + chr(34))}\n"
    if not found["first"]:
        return line
    own = "source heredoc\n" if found["quote"] else ""  # which has none of the variables outside
    return f"{line}{own}{found['body']}" if own else f"{line}while heredoc\n{found['body']}done\n"


def _set_in_sums(texts: Iterable[str]) -> set[str]:
    """Return the variables of assignments in arithmetic."""
    return {one or other for text in texts for one, other in _SETS.findall(text)}


def _statements(text: str) -> Iterator[Statement]:
    """Yield the statements of a script."""
    statement, before, depth = list[str](), "\n", 0
    for token in _TOKEN.finditer(text + "\n"):
        word, kind = token[0], token.lastgroup
        depth = max(0, depth + {"(": 1, ")": -1}.get(word, 0))
        if kind == "end" and depth == 0 and not (word in ("&&", "||") and statement[:1] in _CONDITIONS):
            yield statement, before not in ("&&", "||")
            statement, before, depth = [], word, 0
        elif kind and word != "\n":
            statement.append(word)


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

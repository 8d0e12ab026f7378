"""Words of the training command of a shell script, without running it.

Followed are assignments, arrays, `+=`, `${NAME:-default}`, `$((...))` and conditions on text and numbers. What a loop, a
`case`, or a branch of any other condition assigns is unknown, like `$(...)`, and stays in the words as `$NAME`.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Mapping, Sequence

PROGRAM = re.compile(r"(^|.*/)(pretrain_\w+\.py|torchtitan[./]train(\.py)?)$")

_UNKNOWN = "\0"  # the value of a variable that depends on what is not followed
_TOKEN = re.compile(
    r"""(?P<comment>(?<![^\s;&|()])\#[^\n]*)|(?P<space>(?:[ \t]|\\\n)+)|(?P<end>\n|;;|;|&&|\|\||&|\|)"""
    r"""|(?P<bracket>\(|\))|(?P<word>(?:\\.|'[^']*'|"(?:\\.|\$\([^()]*(?:\([^()]*\)[^()]*)*\)|\$\{[^}]*\}|[^"\\])*\""""
    r"""|\$\((?:[^()]|\([^()]*\))*\)|\$\{(?:"[^"]*"|[^}"])*\}|`[^`]*`|[^\s;&|()'"`\\])+)""",
    re.DOTALL,
)
_PART = re.compile(
    r"""\\(?P<escaped>.)|'(?P<single>[^']*)'|"(?P<double>(?:\\.|[^"\\])*)\"|\$\(\((?P<sum>.*?)\)\)"""
    r"""|(?P<command>\$\((?:[^()]|\([^()]*\))*\)|`[^`]*`)|\$\{(?P<braced>(?:"[^"]*"|[^}"])*)\}|\$(?P<name>\w+)""",
    re.DOTALL,
)
_BRACED = re.compile(r"(?P<name>\w+)(?P<all>\[[@*]\])?(?::?(?P<operator>[-=+?])(?P<word>.*))?", re.DOTALL)
_ASSIGNMENT = re.compile(r"(\w+)(\+?)=(.*)", re.DOTALL)
_SUMS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv,
         ast.Mod: operator.mod}  # fmt: skip
_TESTS = {
    "=": operator.eq, "==": operator.eq, "!=": operator.ne, "-eq": operator.eq, "-ne": operator.ne,
    "-gt": operator.gt, "-ge": operator.ge, "-lt": operator.lt, "-le": operator.le,
}  # fmt: skip
_OPENS, _CLOSES = {"if", "for", "while", "until", "case"}, {"fi", "done", "esac"}


class ShellScript:
    """A script, read for its variables and its training command. `environment`: variables before it; `arguments`: words
    behind its name, for `$1` and on.
    """

    def __init__(self, text: str, environment: Mapping[str, str], arguments: Sequence[str] = ()) -> None:
        self.variables: dict[str, list[str]] = {name: [value] for name, value in environment.items()}
        self.variables |= {str(number): [word] for number, word in enumerate(arguments, 1)}
        self.command: list[str] = []
        self._branches: list[bool | None] = []  # of open blocks: followed, not, or unknown
        self._done: list[bool | None] = []  # a branch before was followed
        statement: list[str] = []
        before, depth = "\n", 0
        for token in _TOKEN.finditer(text):
            kind, word = token.lastgroup, token[0]
            depth += {"(": 1, ")": -1}.get(word, 0)
            if kind == "end" and depth <= 0:
                condition = statement[:1] in (["if"], ["elif"]) or "[" in statement[:1] or "[[" in statement[:1]
                if condition and word in ("&&", "||"):
                    statement.append(word)
                    continue
                self._run(statement, before)
                statement, before, depth = [], word, 0
            elif kind in ("word", "bracket"):
                statement.append(word)
        self._run(statement, before)

    def expand(self, text: str, quoted: bool = False) -> list[str]:
        """Return the words that a word of the script becomes: several for arrays and unquoted text with spaces."""
        words, at = [""], 0
        for part in _PART.finditer(text):
            if quoted and part["single"] is not None:
                continue
            words[-1] += text[at : part.start()]
            at = part.end()
            if part["escaped"] is not None:
                words[-1] += "" if part["escaped"] == "\n" else part["escaped"]
                continue
            literal = part["single"] is not None or part["double"] is not None
            values = [part["single"]] if part["single"] is not None else self._values(part)
            if not literal and not quoted:
                values = [word for value in values for word in value.split()]
                if not values:
                    continue
            words[-1] += values[0] if values else ""
            words += values[1:]
        words[-1] += text[at:]
        return words if words != [""] or quoted or '"' in text or "'" in text else []

    def _values(self, part: re.Match[str]) -> list[str]:
        """Return the values of double quotes or an expansion; an unknown one stays."""
        if part["double"] is not None:
            return self.expand(part["double"], quoted=True)
        if part["sum"] is not None:
            return [self._sum(part["sum"], part[0])]
        given = _BRACED.fullmatch(part["braced"] or part["name"] or "")
        if given is None:
            return [part[0]]
        values = self.variables.get(given["name"])
        if given["operator"] == "+":
            return self.expand(given["word"]) if values else []
        if given["operator"] in ("-", "=") and not (values and values != [""]):
            return self.expand(given["word"])
        return ["$" + given["name"]] if values is None or _UNKNOWN in values else values

    def _sum(self, text: str, whole: str) -> str:
        """Return the value of whole numbers with + - * / %."""
        plain = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\b\}?", lambda name: self.variables.get(name[1], ["?"])[0], text)

        def value(node: ast.expr) -> int:
            if isinstance(node, ast.BinOp):
                return _SUMS[type(node.op)](value(node.left), value(node.right))
            return int(ast.unparse(node))

        try:
            return str(value(ast.parse(plain.strip(), mode="eval").body))
        except (SyntaxError, ValueError, KeyError, ArithmeticError):
            return whole

    def _run(self, statement: list[str], before: str) -> None:
        """Follow one statement; `before`: what separates it from the one before."""
        while statement and statement[0] in ("then", "do", "{", "}", "export", "local", "readonly", "declare", "time"):
            statement = statement[1:]
        first = statement[0] if statement else ""
        if first in _OPENS:
            self._branches.append(self._test(statement[1:]) if first == "if" else None)
            self._done.append(self._branches[-1])
        elif first in ("elif", "else") and self._branches:
            done = self._done[-1]
            now = True if first == "else" else self._test(statement[1:])
            self._branches[-1] = None if done is None else now and not done
            self._done[-1] = None if done is None or now is None else done or now
        elif first in _CLOSES and self._branches:
            self._branches.pop(), self._done.pop()
        if first == "else" and len(statement) > 1:
            self._run(statement[1:], before)
        elif statement and False not in self._branches:
            known = None not in self._branches and before not in ("&&", "||")
            while statement and (assigned := _ASSIGNMENT.match(statement[0])):
                end = statement.index(")") + 1 if statement[1:2] == ["("] and not assigned[3] else 1
                self._assign(assigned, statement[2 : end - 1] if end > 1 else None, known)
                statement = statement[end:]
            self._offer([word for text in statement for word in self.expand(text)])

    def _assign(self, assigned: re.Match[str], array: list[str] | None, known: bool) -> None:
        name, adds, text = assigned.groups()
        values = [word for one in array for word in self.expand(one)] if array is not None else [" ".join(
            self.expand(text, quoted='"' not in text and "'" not in text))]  # fmt: skip
        before = self.variables.get(name, []) if adds else []
        if adds and array is None:
            values, before = ["".join([*before[:1], *values])], before[1:]
        self.variables[name] = [*before, *values] if known else [_UNKNOWN]
        self._offer(values)

    def _offer(self, words: list[str]) -> None:
        """Keep the words of the training command; quoted commands, such as those of `bash -c`, are split."""
        split = [one for word in words for one in (_split(word) if "train" in word and " " in word else [word])]
        if any(map(PROGRAM.match, split[:-1])):
            self.command = split

    def _test(self, words: list[str]) -> bool | None:
        """Return the value of a condition, None if it is not known."""
        results: list[bool | None] = []
        joins = [word for word in words if word in ("&&", "||")]
        for text in re.split(r" && | \|\| ", " ".join(words)):
            given = [" ".join(self.expand(f'"{word}"' if word.startswith("$") else word)) for word in text.split(" ")]
            given = [re.sub(r"^\$\w+$", "", word) for word in given if word not in ("[", "]", "[[", "]]", "then")]
            results.append(self._holds(given))
        if None in results or len(set(joins)) > 1:
            return None
        return any(results) if "||" in joins else all(results)

    def _holds(self, given: list[str]) -> bool | None:
        if given[:1] == ["!"]:
            inner = self._holds(given[1:])
            return None if inner is None else not inner
        if len(given) == 2 and given[0] in ("-z", "-n"):
            return (given[1] == "") == (given[0] == "-z")
        if len(given) != 3 or given[1] not in _TESTS:
            return None
        numbers = given[1].startswith("-")
        try:
            return bool(_TESTS[given[1]](*((int(one) if numbers else one) for one in (given[0], given[2]))))
        except ValueError:
            return None


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()

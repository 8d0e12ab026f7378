"""The result of a check on a node, and its form on the wire."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from megascale.core.errors import MegascaleError


class CheckError(MegascaleError):
    """A check that does not exist, has wrong arguments, or whose result has an unknown form."""


@dataclass(frozen=True)
class CheckResult:
    """The result of a check on a node.

    - `value`: in `unit`, to be compared with other nodes; None without a measurement
    - `problem`: why the node fails without comparison, "" otherwise; `skipped`: why the check does not apply here
    - `digest`: fingerprint of a computation, equal on healthy nodes with the same `platform` (hardware and software)
    - `details`: further measurements by name; `parts`: the results of a set of checks
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", ser_json_inf_nan="strings")

    name: str
    unit: str = ""
    value: float | None = None
    duration_s: float = 0.0
    problem: str = ""
    skipped: str = ""
    digest: str = ""
    platform: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)
    parts: tuple[CheckResult, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> CheckResult:
        """Read JSON values of another process or node. Raises: CheckError"""
        try:
            return _adapter().validate_python(tree)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise CheckError(f"a check's result has an unknown form: {where}: {first['msg']}") from None

    @property
    def flat(self) -> tuple[CheckResult, ...]:
        """The results of single checks: of this check, or of the set's parts."""
        return tuple(result for part in self.parts for result in part.flat) or (self,)


@functools.cache
def _adapter() -> TypeAdapter[CheckResult]:
    return TypeAdapter(CheckResult)

"""The requests of a dashboard's page, without a browser."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def callback_request(dependencies: list[dict[str, Any]], output: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of the callback that makes `output`, such as "header.children", from the `values` of its inputs
    and states by "id.property"; None where there is none.
    """
    (found,) = [each for each in dependencies if output in each["output"].strip(".").split("...")]
    given = {
        kind: [{**place, "value": values.get(f"{place['id']}.{place['property']}")} for place in found[kind]]
        for kind in ("inputs", "state")
    }
    names = found["output"].strip(".").split("...")
    outputs = [dict(zip(("id", "property"), re.sub("@.*", "", name).rsplit(".", 1), strict=True)) for name in names]
    first = found["inputs"][0]
    changed = [f"{first['id']}.{first['property']}"]
    several = found["output"].startswith("..")
    return {"output": found["output"], "outputs": outputs if several else outputs[0], "changedPropIds": changed} | given

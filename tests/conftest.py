"""Settings of the whole suite."""

from __future__ import annotations

from hypothesis import settings

# No deadlines: the machine is shared. The same examples each time: a failure must not come and go.
settings.register_profile("megascale", deadline=None, derandomize=True)
settings.load_profile("megascale")

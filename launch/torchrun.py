"""Run torchrun, and end with the exit status of the rank that failed first, as the local launcher does.

torchrun's own status is 1 for every failure: a scheduler could not tell a run that must not be started again (93) from
a lost host.
"""

from __future__ import annotations

import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main


def run() -> int:
    """Run torchrun with the arguments of this process. Returns the exit status."""
    try:
        main()
    except ChildFailedError as error:
        print(error, file=sys.stderr, flush=True)  # the summary, with the root cause
        _, first = error.get_first_failure()
        return first.exitcode if first.exitcode > 0 else 1  # negative: ended by a signal
    return 0


if __name__ == "__main__":
    sys.exit(run())

"""Runs pytest inside an image's own environment.

    .envs/<image>/bin/python tests/run_in.py [pytest's arguments]

The tools come last on the path: whatever else a test imports has to be in that image's lock.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    tools = ROOT / ".envs/tests/lib/python3.11/site-packages"
    if not tools.is_dir():
        sys.stderr.write("run_in: the tools are not there: python3 services/environments.py tests\n")
        return 1
    sys.path.append(str(tools))
    # For torch in this process and in those that tests start: spinning threads take the cores from each other.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    import pytest

    return int(pytest.main(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main())

"""A service that is alive until it is told to stop; a stubborn one does not listen."""

import os
import signal
import sys
from pathlib import Path


def stop(*_: object) -> None:
    sys.exit(0)


signal.signal(signal.SIGTERM, signal.SIG_IGN if "stubborn" in sys.argv else stop)
if os.environ["KIND"] != "unhealthy":
    Path("/tmp/alive").touch()
while True:
    signal.pause()

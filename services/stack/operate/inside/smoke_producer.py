"""Whether this image can produce: its jobs and all that they import load. Whether it works, its heartbeat tells."""

import importlib
import sys

if __name__ == "__main__":
    importlib.import_module("services.producer.jobs")
    sys.stdout.write("the producer's jobs load\n")

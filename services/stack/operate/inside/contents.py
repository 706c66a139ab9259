"""Prints, as JSON, the versions of the packages named as arguments, of Python, and of torch's CUDA."""

import importlib.metadata
import json
import runpy
import sys


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cuda() -> str | None:
    """torch.version.cuda, without importing torch: that would need its libraries to load."""
    try:
        source = importlib.metadata.distribution("torch").locate_file("torch/version.py")
    except importlib.metadata.PackageNotFoundError:
        return None
    return runpy.run_path(str(source))["cuda"] or "none"


if __name__ == "__main__":
    found = {name: version(name) for name in sys.argv[1:]}
    found["python"] = f"{sys.version_info[0]}.{sys.version_info[1]}"
    found["cuda"] = cuda()
    sys.stdout.write(json.dumps(found) + "\n")

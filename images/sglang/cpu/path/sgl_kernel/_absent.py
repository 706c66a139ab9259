"""Kernels that can be named but not called."""

from collections.abc import Callable
from typing import NoReturn


def absent_kernels(module: str) -> Callable[[str], Callable[..., NoReturn]]:
    """A module's `__getattr__`: any public name is a function that raises NotImplementedError."""

    def attribute(name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")

        def kernel(*_: object, **__: object) -> NoReturn:
            raise NotImplementedError(f"{module}.{name} is a compiled kernel: it is not in the CPU image")

        return kernel

    return attribute

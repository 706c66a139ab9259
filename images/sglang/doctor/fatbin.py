"""For which cards a compiled extension has code, read from its fat binaries."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SECTION = b".nv_fatbin"
MAGIC = 0xBA55ED50
PTX, MACHINE_CODE = 1, 2


class Code(NamedTuple):
    kind: int
    """PTX, which a newer card can still compile, or MACHINE_CODE."""
    architecture: int
    """As compilers write it: 120 is SM120."""


def code_in(library: Path) -> set[Code]:
    """What the fat binaries of a 64-bit ELF file hold. A file without them gives an empty set.

    The format is NVIDIA's own and not documented: a container (magic, version, size of its header, size of what
    follows) holds entries, each with kind and architecture in its header. It is read here as nvcc 12 and 13 write it.
    """
    if library.stat().st_size < 64:
        return set()
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return {code for start, end in _sections(content) for code in _entries(content, start, end)}


def _sections(content: mmap.mmap) -> Iterator[tuple[int, int]]:
    """Begin and end in the file of each section with fat binaries."""
    if content[:5] != b"\x7fELF\x02":
        return
    table, (size, count, names) = struct.unpack_from("<Q", content, 40)[0], struct.unpack_from("<HHH", content, 58)
    headers = [struct.unpack_from("<IIQQQQ", content, table + number * size) for number in range(count)]
    for name, _type, _flags, _address, offset, length in headers:
        start = headers[names][4] + name
        if content[start : start + len(SECTION) + 1] == SECTION + b"\0":
            yield offset, offset + length


def _entries(content: mmap.mmap, start: int, end: int) -> Iterator[Code]:
    while start + 16 <= end:
        magic, _version, header, length = struct.unpack_from("<IHHQ", content, start)
        if magic != MAGIC:
            start += 8  # containers are aligned: what lies between them is padding
            continue
        entry, start = start + header, start + header + length
        while entry + 32 <= start:
            kind, _version, header, length = struct.unpack_from("<HHIQ", content, entry)
            yield Code(kind, struct.unpack_from("<I", content, entry + 28)[0])
            entry += header + length

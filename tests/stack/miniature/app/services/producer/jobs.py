"""What a check of this image imports. A broken one fails in its service's place alone."""

import os

HELD = bytearray(b"x") * (200_000_000 if os.environ["KIND"] == "heavy" else 0)
if os.environ["KIND"] == "broken" and "PLACE" in os.environ:
    raise ImportError("undefined symbol: _ZN3c104cuda9SetDeviceEi")

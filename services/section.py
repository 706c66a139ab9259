"""What every part of the configuration file has in common."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of the configuration file: immutable, and strict about names."""

    # Built when a file is checked: most commands check none.
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

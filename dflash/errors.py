"""What a user's mistake or an unusable input raises, and a process of a run that went."""


class DflashError(Exception):
    """Says in one line what is wrong, where, and what to do. The command line prints it and exits with 1."""


class LostRankError(DflashError):
    """A process of a run died or hung, which need be nobody's mistake. The command line exits with 70."""

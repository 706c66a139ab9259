"""The one exception that a user's mistake or an unusable input raises."""


class DflashError(Exception):
    """Says in one line what is wrong, where, and what to do. The command line prints it and exits with 1."""

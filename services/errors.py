"""The error that a user can do something about."""


class UserError(Exception):
    """What is wrong, where, and what to do, in one line; shown without a traceback and never retried."""

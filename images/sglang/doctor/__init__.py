"""Proves, with no GPU, that this environment can build and load what SGLang needs on the card; finds what is wrong.

    python -m doctor check                 every check, a line each; exit 1 when one fails
    python -m doctor serve [SERVER ARGS]   the checks, then the server, with its options as this version spells them

A check is a function that yields a `Fault` for each thing that is wrong. Standard library only: what is broken may
be anything else.
"""

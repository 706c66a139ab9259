"""The subcommands of `dflash-stack`, by topic.

A command imports what it works with when it runs: the imports of all of them would take longer than most commands do.
"""

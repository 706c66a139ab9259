"""The trainer's room: takes train, evaluate and export jobs, and runs `dflash` as a process of its own."""

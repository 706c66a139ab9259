"""`python -m services.stack` is the command `dflash-stack`."""

from services.stack.cli import main

if __name__ == "__main__":
    main()

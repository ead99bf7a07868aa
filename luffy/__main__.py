"""The command ``luffy``, and ``python -m luffy``, which the launchers start."""

import os
import sys


def main() -> None:
    """Run the command line, unless there is no current folder: torch ends the process when it is imported there."""
    try:
        os.getcwd()
    except OSError:
        sys.exit("luffy: error: the current folder does not exist any more; change to another one and run it again")
    from luffy.cli import main as run

    run()


if __name__ == "__main__":
    main()

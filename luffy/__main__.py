"""`python -m luffy`."""

from luffy.cli import main

main()

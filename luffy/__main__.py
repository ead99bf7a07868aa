"""``python -m luffy``: what the launchers start."""

from luffy.cli import main

main()

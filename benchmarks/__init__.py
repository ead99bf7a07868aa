"""Measurements of speed and memory: scripts, and ``bench``, which they share with ``luffy bench`` (speed.py)."""

import sys
from pathlib import Path

# Scripts import ``bench`` whether they are started as files or imported from the repository's folder.
sys.path.append(str(Path(__file__).parent))

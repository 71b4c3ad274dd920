"""Read the rows and show what would be learned: python scripts/check_data.py --help"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from agent.cli import main

sys.exit(main(["check-data", *sys.argv[1:]]))

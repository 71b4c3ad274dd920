"""Train in the foreground: python scripts/run_finetune_local.py --help"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from agent.cli import main

sys.exit(main(["run", *sys.argv[1:]]))

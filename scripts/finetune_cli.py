"""Any verb of the console command, without installing it: python scripts/finetune_cli.py --help"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from agent.cli import main

sys.exit(main())

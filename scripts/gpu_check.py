"""Check this machine's GPU (or the part that a CPU can run) with the product itself; see proof/gpu.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from proof.gpu import main

if __name__ == "__main__":
    sys.exit(main())

"""What is measured of a process: its peak of memory, told by what it really allocates."""

import subprocess
import sys

PROGRAM = """
import resource
import torch
from finetune.train.metrics import peak_memory_bytes

cpu = torch.device("cpu")
before = peak_memory_bytes(cpu)
resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
block = bytearray(400_000_000)
block[:: 4096] = b"x" * len(block[:: 4096])
print(before, resident, peak_memory_bytes(cpu))
"""


def test_the_peak_counts_what_is_allocated_and_no_pages_of_libraries() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    before, resident, after = map(int, done.stdout.split())
    assert 0 < before < resident - 50_000_000  # torch alone has more than that in its libraries
    assert 300_000_000 < after - before < 410_000_000  # the import may have had a peak of its own

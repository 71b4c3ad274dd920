"""Compares a table with the one expected and prints the reward as JSON: the share of lines that are right."""

import json
import sys
from pathlib import Path

expected = Path(sys.argv[1]).read_text().split()
try:
    found = Path(sys.argv[2]).read_text().split()
except (OSError, UnicodeDecodeError):
    found = []
parts = {line.split(",")[0]: float(line in found) for line in expected[1:]}
is_sound = found[:1] == expected[:1] and len(found) == len(expected)
print(json.dumps({"reward": sum(parts.values()) / len(parts) if is_sound else 0.0} | parts))

"""inventory.json is valid and says what it was meant to say."""

import json
from pathlib import Path

MEANT = {
    "shop": "Corner desk",
    "items": [
        {"name": "pencil", "count": 120, "price": 0.5},
        {"name": "eraser", "count": 40, "price": 0.8},
        {"name": 'ruler 12"', "count": 15, "price": 1.25},
        {"name": "ink // blue", "count": None, "price": 4.0},
    ],
    "open": True,
}


def test_the_inventory_says_what_was_meant():
    found = json.loads(Path("inventory.json").read_text())
    assert found == MEANT
    assert found["open"] is True

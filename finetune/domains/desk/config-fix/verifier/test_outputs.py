"""service.ini has the changes that were asked for, and no others."""

import configparser
from pathlib import Path

CHANGED = {"port = 8080", "level = debug", "file = /tmp/desk.log"}
GIVEN = """; the desk service
[server]
host = 127.0.0.1
port = 8080
; seconds
timeout = 30
[log]
level = debug
file = /tmp/desk.log
[limits]
uploads = 10
; do not change
seed = 4711""".splitlines()


def test_the_values_are_those_of_the_list():
    config = configparser.ConfigParser()
    config.read_string(Path("service.ini").read_text())
    assert {name: dict(config[name]) for name in config.sections()} == {
        "server": {"host": "127.0.0.1", "port": "8443", "timeout": "30"},
        "log": {"level": "warning", "file": "/var/log/desk.log"},
        "limits": {"uploads": "10", "seed": "4711", "retries": "3"},
    }


def test_the_other_lines_are_as_they_were():
    assert "port = 8080" not in Path("service.ini").read_text()
    found = [line.strip() for line in Path("service.ini").read_text().splitlines()]
    kept = [line for line in GIVEN if line not in CHANGED]
    assert [line for line in found if line in kept] == kept

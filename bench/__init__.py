"""Measurements against a peer, both sides interleaved in one run on the same machine; `make bench` writes bench.json."""

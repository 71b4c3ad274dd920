"""A verifier for tests: the share of characters with an even code, so that rewards differ within a group."""


def score(row: dict, completion: str) -> float:
    return sum(ord(letter) % 2 == 0 for letter in completion) / max(len(completion), 1)

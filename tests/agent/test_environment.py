"""What children inherit, and what is masked in everything that is written."""

import pytest

from agent.environment import child_environment, replayed_environment, scrub, secret_values

PLANTED = {
    "HF_TOKEN": "hf_TESTTESTTEST",
    "WANDB_API_KEY": "k_TEST",
    "OPENAI_API_KEY": "sk-TEST",
    "DB_PASSWORD": "pw_TEST",
}


def test_children_get_no_other_launchers_variables_and_no_foreign_secrets() -> None:
    launcher = dict.fromkeys(
        ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"), "1"
    )
    given = (
        launcher
        | PLANTED
        | {"PATH": "/bin", "NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "lo", "SOMETHING": "else"}
    )
    kept = child_environment(given, {"CUDA_VISIBLE_DEVICES": "2"})
    assert not kept.keys() & launcher.keys()
    assert kept.keys() & PLANTED.keys() == {"HF_TOKEN"}  # our own children fetch gated models
    assert "SOMETHING" not in kept
    assert (kept["PATH"], kept["NCCL_DEBUG"], kept["GLOO_SOCKET_IFNAME"]) == ("/bin", "INFO", "lo")
    assert (kept["CUDA_VISIBLE_DEVICES"], kept["PYTHONSAFEPATH"], kept["PYTHONUNBUFFERED"]) == ("2", "1", "1")


def test_replayed_environment_has_what_matters_and_no_secret() -> None:
    given = {
        "HF_TOKEN": "hf_TESTTESTTEST",
        "PATH": "/bin",
        "OMP_NUM_THREADS": "2",
        "CUDA_VISIBLE_DEVICES": "1",
        "HF_HOME": "/h",
    }
    assert replayed_environment(given) == {
        "CUDA_VISIBLE_DEVICES": "1",
        "HF_HOME": "/h",
        "OMP_NUM_THREADS": "2",
    }


def test_scrub_masks_the_values_of_secrets_wherever_they_stand() -> None:
    value = {
        "argv": ["--x", "sk-TEST"],
        "text": "k_TEST and pw_TEST",
        "deep": [{"t": "hf_TESTTESTTEST!"}],
        "n": 1,
    }
    assert scrub(value, PLANTED) == {
        "argv": ["--x", "***"],
        "text": "*** and ***",
        "deep": [{"t": "***!"}],
        "n": 1,
    }


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("http://u:pw@127.0.0.1:1/", "http://***@127.0.0.1:1/"),
        ("https://example.org/a@b", "https://example.org/a@b"),
        ("token hf_abcdefghijklmnop end", "token *** end"),
        ("sk-proj-0123456789abcdef", "***"),
        ("a plain sentence", "a plain sentence"),
    ],
)
def test_scrub_masks_what_looks_like_a_secret(text: str, clean: str) -> None:
    assert scrub(text, {}) == clean


def test_a_secret_that_contains_another_is_masked_whole() -> None:
    environ = {"A_TOKEN": "abcdef", "B_TOKEN": "abcdefghij"}
    assert scrub("abcdefghij abcdef", environ) == "*** ***"


def test_short_values_and_other_names_are_no_secrets() -> None:
    assert (
        secret_values({"A_TOKEN": "yes", "TOKENIZERS_PARALLELISM": "false-ish", "KEYBOARD": "german"}) == []
    )

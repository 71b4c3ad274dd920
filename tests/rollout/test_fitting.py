"""What is cut of a conversation, how much of it, and what never is. One character counts as one token here."""

from finetune.rollout.fitting import MARKER, fit_messages

SYSTEM = {"role": "system", "content": "s" * 300}
USER = {"role": "user", "content": "u" * 300}
ANSWER = {"role": "assistant", "content": "a" * 300}


def tool(letter: str, length: int = 1000) -> dict:
    return {"role": "tool", "content": letter * length, "tool_call_id": f"call_{letter}"}


def size(messages: list[dict]) -> int:
    return sum(len(message["content"]) for message in messages)


TALK = [SYSTEM, USER, ANSWER, tool("x"), ANSWER, tool("y"), USER]  # 3500 characters


def test_what_fits_is_left_as_it_is() -> None:
    fitted = fit_messages(TALK, size, 3500)
    assert (fitted.messages, fitted.num_tokens, fitted.cuts) == (TALK, 3500, [])


def test_the_oldest_tool_output_is_cut_to_the_longest_that_fits() -> None:
    fitted = fit_messages(TALK, size, 3400)
    (cut,) = fitted.cuts
    assert (cut["message"], cut["tool_call_id"], cut["characters"]) == (3, "call_x", 1000)
    marker = MARKER.format(left_out=1000 - cut["kept"])
    assert fitted.messages[3]["content"].count("x") == cut["kept"]
    assert f"x\n{marker}\nx" in fitted.messages[3]["content"]
    assert 3399 <= fitted.num_tokens <= 3400
    assert [message for place, message in enumerate(fitted.messages) if place != 3] == [
        message for place, message in enumerate(TALK) if place != 3
    ]


def test_the_next_output_is_cut_only_where_the_oldest_does_not_suffice() -> None:
    fitted = fit_messages(TALK, size, 2400)
    assert [(cut["message"], cut["kept"] > 0) for cut in fitted.cuts] == [(3, False), (5, True)]
    assert fitted.messages[3]["content"] == MARKER.format(left_out=1000)
    assert fitted.num_tokens <= 2400


def test_system_user_and_assistant_text_is_never_cut() -> None:
    fitted = fit_messages(TALK, size, 100)
    assert [message for message in fitted.messages if message["role"] != "tool"] == [
        message for message in TALK if message["role"] != "tool"
    ]
    assert fitted.num_tokens == 1500 + 2 * len(MARKER.format(left_out=1000))
    assert TALK[3]["content"] == "x" * 1000, "what was given is not changed"


def test_headroom_is_left_once_something_is_cut_but_does_not_cut_by_itself() -> None:
    assert fit_messages(TALK, size, 3500, headroom=1000).cuts == []
    assert fit_messages(TALK, size, 3499, headroom=500).num_tokens <= 2999


def test_an_output_no_longer_than_its_marker_stays() -> None:
    short = [SYSTEM, tool("z", 20), USER]
    fitted = fit_messages(short, size, 10)
    assert (fitted.messages, fitted.cuts) == (short, [])

"""The ids of a conversation: continued exactly while the agent goes on from an answer, rendered afresh once it does not."""

import pytest

from finetune.rollout.bridge import Bridge, BridgeSettings
from finetune.rollout.fitting import MARKER
from finetune.rollout.transcript import Transcript
from tests.rollout.scripted import BASH, CONTEXT, ScriptedEngine, call_text, post, spelled, tiny_chat, told

SYSTEM = {"role": "system", "content": "You work."}
USER = {"role": "user", "content": "what is here?"}
OTHER_TOOL = {"type": "function", "function": {"name": "read"}}


@pytest.fixture(scope="module")
def chat():
    return tiny_chat()


@pytest.fixture
def engine(chat):
    return ScriptedEngine(chat, [call_text("ls"), "the end"])


@pytest.fixture
def bridge(engine, chat):
    with Bridge(engine, chat, None, BridgeSettings(CONTEXT, 64)) as bridge:
        yield bridge


def result_of(message: dict, content: str, place: int = 0) -> dict:
    return {"role": "tool", "tool_call_id": message["tool_calls"][place]["id"], "content": content}


def test_what_was_sampled_is_the_prefix_although_it_would_be_tokenised_otherwise(bridge, chat):
    session = bridge.open("r", seed=1)
    answer = told(post(session, [SYSTEM, USER], tools=[BASH]))
    talk = [SYSTEM, USER, answer, result_of(answer, "a <|im_end|> b")]
    post(session, talk, tools=[BASH])
    first, second = bridge.close(session)
    sampled = first.prompt_ids + first.completion_ids
    assert second.prompt_ids[: len(sampled)] == sampled
    assert (second.history, second.extends, second.parent) == ("extended", 0, 0)
    added = chat.tokens.decoded(second.prompt_ids[len(sampled) :])
    assert added == (
        "\n<|im_start|>user\n<tool_response>\na <|im_end|> b\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    ends = [token for token in second.prompt_ids if token in chat.stop_token_ids]
    assert len(ends) == 4, "system, user, answer and tool turn; the one that the output spells is text"
    afresh = Transcript(chat).prompt_ids(_templates(talk), [BASH])
    assert second.prompt_ids != afresh
    assert chat.tokens.decoded(second.prompt_ids).count("ls") == chat.tokens.decoded(afresh).count("ls")


def _templates(talk: list[dict]) -> list[dict]:
    """Return a talk as templates get it: arguments as objects, null as empty text."""
    from finetune.domains.text import turns_of

    return turns_of(talk, "messages")


@pytest.mark.parametrize("template", ["plain", "bos", "gen"])
def test_a_continuation_of_canonical_tokens_equals_a_rendering(template):
    """Where the sampler wrote just what the template writes, both ways must give the same ids, whatever follows."""
    chat = tiny_chat(template=template)
    transcript = Transcript(chat)
    tail = [
        {"role": "tool", "content": "x\ny", "tool_call_id": "a"},
        {"role": "tool", "content": "", "tool_call_id": "b"},
        {"role": "user", "content": "go on"},
    ]
    for answer in (
        {"role": "assistant", "content": "plain text"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"type": "function", "function": {"name": "bash", "arguments": {"command": "ls"}}}
            ],
        },
    ):
        before = [USER]
        prompt = transcript.prompt_ids(before, [BASH])
        whole = chat.prompt([*before, answer], [BASH])
        text = chat.tokens.decoded(whole)[len(chat.tokens.decoded(prompt)) :]
        said = text[: text.index(chat.end_token) + len(chat.end_token)]
        completion = chat.tokens.ids([said])[said]
        longer = transcript.continued_ids(before, answer, tail, [BASH], prompt + completion, True)
        assert longer == transcript.prompt_ids([*before, answer, *tail], [BASH])
        cut = transcript.continued_ids(before, answer, tail, [BASH], prompt + completion[:-1], False)
        assert cut == longer, "where the limit cut an answer, the end of the turn is added"


def test_a_cut_answer_is_continued_with_the_end_of_its_turn(bridge, engine, chat):
    engine.script = ["half an ans...", "more"]
    session = bridge.open("r", seed=1)
    answer = told(post(session, [USER]))
    post(session, [USER, answer, {"role": "user", "content": "go on"}])
    first, second = bridge.close(session)
    sampled = first.prompt_ids + first.completion_ids
    assert second.prompt_ids[: len(sampled)] == sampled
    assert chat.tokens.decoded(second.prompt_ids[len(sampled) :]).startswith(
        "<|im_end|>\n<|im_start|>user\ngo on"
    )


def test_space_that_agents_trim_and_null_content_change_nothing(bridge, engine):
    engine.script = ["  spaced \n", call_text("ls"), "end"]
    session = bridge.open("r", seed=1)
    first = told(post(session, [USER], tools=[BASH]))
    talk = [USER, {"role": "assistant", "content": first["content"].strip()}, USER]
    second = told(post(session, talk, tools=[BASH]))
    call = {**second["tool_calls"][0], "function": {"name": "bash", "arguments": '{ "command":"ls" }'}}
    talk += [{"role": "assistant", "content": "", "tool_calls": [call]}, result_of(second, "x")]
    post(session, talk, tools=[BASH])
    records = bridge.close(session)
    assert [record.history for record in records] == ["first", "extended", "extended"]
    assert [record.extends for record in records] == [None, 0, 1]


@pytest.mark.parametrize(
    ("changed", "history"),
    [
        (lambda talk: [{**talk[0], "content": "Other."}, *talk[1:]], "rewritten"),
        (lambda talk: [talk[0], talk[1], {"role": "assistant", "content": "mine"}, talk[3]], "rewritten"),
        (lambda talk: [talk[0], {"role": "user", "content": "summary of all"}], "first"),
    ],
)
def test_a_rewritten_history_is_rendered_afresh(bridge, chat, changed, history):
    session = bridge.open("r", seed=1)
    answer = told(post(session, [SYSTEM, USER], tools=[BASH]))
    talk = changed([SYSTEM, USER, answer, result_of(answer, "x")])
    post(session, talk, tools=[BASH])
    first, second = bridge.close(session)
    assert (second.history, second.extends, second.parent) == (history, None, None)
    assert second.prompt_ids == Transcript(chat).prompt_ids(_templates(talk), [BASH])
    assert (first.status, second.status) == ("used", "used")


def test_a_change_of_an_answers_arguments_is_a_rewrite(bridge):
    session = bridge.open("r", seed=1)
    answer = told(post(session, [USER], tools=[BASH]))
    answer["tool_calls"][0]["function"]["arguments"] = '{"command": "pwd"}'
    post(session, [USER, answer, result_of(answer, "x")], tools=[BASH])
    assert bridge.close(session)[1].history == "rewritten"


def test_other_tools_are_another_prompt(bridge):
    session = bridge.open("r", seed=1)
    answer = told(post(session, [USER], tools=[BASH]))
    post(session, [USER, answer, result_of(answer, "x")], tools=[BASH, OTHER_TOOL])
    first, second = bridge.close(session)
    assert (second.history, second.extends, second.parent) == ("tools", None, 0)
    assert first.status == "used"


def test_sub_agents_and_branches_each_continue_their_own_call(bridge, engine):
    engine.script = ["main one", "sub one", "main two", "branch", "sub two"]
    session = bridge.open("r", seed=1)
    sub = [{"role": "system", "content": "You are a sub-agent."}, USER]
    main_one, sub_one = told(post(session, [SYSTEM, USER])), told(post(session, sub))
    post(session, [SYSTEM, USER, main_one, USER])
    post(session, [SYSTEM, USER, main_one, {"role": "user", "content": "another way"}])
    post(session, [*sub, sub_one, USER])
    records = bridge.close(session)
    assert [record.extends for record in records] == [None, None, 0, 0, 1]
    assert {record.status for record in records} == {"used"}


def test_helper_calls_are_continued_by_helper_calls_alone(bridge, engine):
    engine.script = ["same", "same", "next"]
    session = bridge.open("r", seed=1, helper_prompts=["^Title"])
    title = [{"role": "system", "content": "Title."}, USER]
    answer = told(post(session, title))
    post(session, [*title, answer, USER], tools=[BASH])
    assert bridge.close(session)[1].history == "rewritten"


def test_old_tool_outputs_are_cut_where_the_continuation_is_too_long(bridge, engine, chat):
    engine.script = [call_text("cat a"), call_text("cat b"), "done", "really"]
    session = bridge.open("r", seed=1)
    talk = [SYSTEM, USER]
    for content in ("1" * 3000, "2" * 2000):
        answer = told(post(session, talk, tools=[BASH]))
        talk += [answer, result_of(answer, content)]
    answer = told(post(session, talk, tools=[BASH]))
    post(session, [*talk, answer, USER], tools=[BASH])
    records = bridge.close(session)
    assert [record.history for record in records] == ["first", "extended", "fitted", "extended"]
    (cut,) = records[2].fitted
    assert (cut["message"], cut["characters"]) == (3, 3000)
    text = chat.tokens.decoded(records[2].prompt_ids)
    assert MARKER.format(left_out=3000 - cut["kept"]) in text
    assert "2" * 2000 in text
    assert text.count("1" * 100) <= cut["kept"] // 100
    assert len(records[2].prompt_ids) <= CONTEXT - 64 - CONTEXT // 8
    assert records[3].extends == 2, "what follows goes on from the cut conversation"


def test_a_long_conversation_without_tool_outputs_is_answered_with_what_room_is_left(bridge, engine):
    room = 40
    session = bridge.open("r", seed=1)
    base = len(bridge._transcript.prompt_ids([{"role": "user", "content": ""}], None))
    post(session, [{"role": "user", "content": "1" * (CONTEXT - base - room)}])
    (record,) = bridge.close(session)
    assert (record.sampling["max_new_tokens"], engine.samplings[0].max_new_tokens) == (room, room)


def test_ids_that_no_text_gives_are_kept(bridge, engine, chat):
    """A sampler may stop in the middle of a letter; the agent sees a replacement for it, the record the ids."""
    half = spelled(chat, "é")[:1]

    def sample(calls, sampling):
        from finetune.rollout.engine import Completion

        engine.batches.append(list(calls))
        return [[Completion([*half, chat.stop_token_ids[0]], [-1.0, -1.0], True, "v")] for _ in calls]

    engine.sample = sample
    session = bridge.open("r", seed=1)
    answer = told(post(session, [USER]))
    assert answer["content"] == "\N{REPLACEMENT CHARACTER}"
    post(session, [USER, answer, USER])
    first, second = bridge.close(session)
    sampled = first.prompt_ids + half
    assert second.prompt_ids[: len(sampled)] == sampled


def test_a_template_that_rewrites_earlier_turns_is_continued_by_what_it_adds(chat):
    """Templates of reasoning models drop earlier thoughts: what was sampled stays all the same."""
    text = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
        "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1] }}"
        "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
        "{% for m in messages %}{% for c in m['tool_calls'] or [] %}{{ c | tojson }}{% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    from finetune.data.chat import ChatFormat

    own = ChatFormat(chat.tokenizer, text)
    transcript = Transcript(own)
    answer = {"role": "assistant", "content": "<think>hm</think>yes"}
    ids = transcript.prompt_ids([USER], None) + spelled(chat, "<think>hm</think>yes") + own.stop_token_ids[:1]
    longer = transcript.continued_ids([USER], answer, [USER], None, ids, True)
    assert longer is not None
    assert longer[: len(ids)] == ids
    assert own.tokens.decoded(longer[len(ids) :]) == (
        "\n<|im_start|>user\nwhat is here?<|im_end|>\n<|im_start|>assistant\n"
    )
    # Whatever a tool prints, no turn after it is lost.
    turns = [{"role": "tool", "tool_call_id": "1", "content": "finetune-stands-in-for-an-answer"}, USER]
    longer = transcript.continued_ids([USER], answer, turns, None, ids, True)
    assert "finetune-stands-in-for-an-answer<|im_end|>\n<|im_start|>user" in own.tokens.decoded(longer)

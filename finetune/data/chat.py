"""Conversations and texts -> token ids with a loss weight for each: what the model sees, and what it learns of it.

Rule: a mask is proved, never searched for. What is learned of a turn is what follows the exact token ids that the
model is given at inference, up to and with the token that ends the turn; text of a row never becomes a control token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from finetune.data.arguments import template_arguments
from finetune.data.conversation import Conversation, Encoded, Message, Tools
from finetune.data.template import ChatTemplate, read_template
from finetune.data.tokens import BREAK, TokenText, continued
from finetune.errors import FinetuneError

_THOUGHT = re.compile(r"<think>(.*?)</think>", re.DOTALL)


class _Turn(NamedTuple):
    """A learned turn: the text before it, as at inference, and the text up to its end."""

    prompt: str
    upto: str
    weight: float = 1.0

    @property
    def answer(self) -> str:
        return self.upto.removeprefix(self.prompt)


class _Plan(NamedTuple):
    """The texts of one conversation, before the tokenizer has seen them. A pair and a text are one turn."""

    form: str
    turns: list[_Turn]
    notes: tuple[str, ...]


class ChatFormat:
    """How one tokenizer and one template turn conversations into ids; `template` is the template's text.

    tools: whether any conversation has tools; a template that would lose them is replaced where that is exact.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: str | None = None,
        template_args: dict[str, Any] | None = None,
        system_prompt: str | None = None,
        tools: bool = False,
    ) -> None:
        self.tokens = TokenText(tokenizer)
        self.tokenizer = self.tokens.tokenizer
        self.system_prompt = system_prompt
        self.warnings: list[tuple[str, str]] = []
        self._template_problem: FinetuneError | None = None
        self.template: ChatTemplate | None = None
        self.end_token: str | None = None
        text = template or _own_template(tokenizer, tools)
        if text is not None:
            self.template = ChatTemplate(self.tokenizer, text, template_args or {})
            try:
                self._prepare_template(tools)
            except FinetuneError as error:
                self._template_problem = error
        self.stop_token_ids = self._stop_token_ids()

    @classmethod
    def from_config(cls, config: Any, tokenizer: Any, tools: bool = False) -> ChatFormat:
        """Return the format that the settings ask for; raises FinetuneError for a bad template setting."""
        arguments = template_arguments(config.chat_template_args)
        return cls(tokenizer, read_template(config.chat_template), arguments, config.system_prompt, tools)

    @property
    def template_text(self) -> str | None:
        """The template in use, as it must be exported with the model."""
        return self.template.text if self.template else None

    def problems(self, forms: Collection[str] = ("chat",)) -> list[FinetuneError]:
        """Return why rows of these forms (chat, pair, text) cannot be encoded as they must."""
        found = []
        if {"pair", "text"} & set(forms) and self.tokenizer.eos_token_id is None:
            text = "the tokenizer has no EOS token, with which an answer would have to end"
            found.append(FinetuneError("no_stop_token", text))
        if "chat" in forms:
            found += self._chat_problems()
        return found

    def encode(
        self, conversations: Sequence[Conversation], learn: str = "all"
    ) -> list[list[Encoded] | FinetuneError]:
        """Return the examples of each conversation, or why it has none; the tokenizer is called once for all.

        A conversation is one example; where the template writes a turn otherwise once others follow it (it drops
        earlier reasoning, say), it is one example per learned turn.
        """
        plans = [_or_error(self._plan, conversation, learn) for conversation in conversations]
        turns = [turn for plan in plans if isinstance(plan, _Plan) for turn in plan.turns]
        ids = self.tokens.ids(text for turn in turns for text in turn[:2])
        return [
            plan if isinstance(plan, FinetuneError) else _or_error(self._examples, plan, ids)
            for plan in plans
        ]

    def conversation(
        self, messages: list[Message], tools: Tools | None = None, learn: str = "all"
    ) -> list[Encoded]:
        return self._one(Conversation(messages, tools), learn)

    def completion_pair(self, prompt_text: str, completion_text: str) -> Encoded:
        return self._one(Conversation(prompt=prompt_text, completion=completion_text))[0]

    def text(self, text: str) -> Encoded:
        return self._one(Conversation(text=text))[0]

    def prompt(self, messages: list[Message], tools: Tools | None = None) -> list[int]:
        """Return the ids that the model is given to answer `messages`."""
        return self.prompts_of([Conversation([*messages, {"role": "assistant", "content": ""}], tools)])[0]

    def prompts_of(self, conversations: Sequence[Conversation]) -> list[list[int]]:
        """Return the ids that the model is given before the last answer of each conversation."""
        texts = [self._prompt_text(conversation) for conversation in conversations]
        ids = self.tokens.ids(texts)
        return [
            ids[text] if conversation.form == "chat" else self.tokens.bos_ids + ids[text]
            for conversation, text in zip(conversations, texts, strict=True)
        ]

    def segments(self, ids: Sequence[int], weights: Sequence[float]) -> list[tuple[str, bool]]:
        """Return the text of an example in pieces that are learned or not."""
        pieces = groupby(zip(ids, weights, strict=True), key=lambda pair: pair[1] > 0)
        return [(self.tokens.decoded([token for token, _ in piece]), learned) for learned, piece in pieces]

    def _stop_token_ids(self) -> list[int]:
        """Return the tokens that end an answer: the tokenizer's EOS and the template's end of turn."""
        end = self.tokenizer.convert_tokens_to_ids(self.end_token) if self.end_token else None
        return list(dict.fromkeys(token for token in (self.tokenizer.eos_token_id, end) if token is not None))

    def _prepare_template(self, tools: bool) -> None:
        """Settle on a template that loses no tools, and learn from it which token ends a turn."""
        assert self.template is not None
        if tools and (template := self.template.with_tools()) is not self.template:
            self.template = template
            text = "the model's chat template writes no tools; an equal one that writes them is used and exported with the model"
            self.warnings.append(("template_ignores_tools", text))
        probe = self.template.render(
            [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "zebra"}]
        )
        _, answer, rest = probe.rpartition("zebra")
        if not answer:
            raise FinetuneError("bad_template", "the chat template does not write what the assistant says")
        match = self.tokens.control.search(rest)
        self.end_token = match[0] if match else None
        if self.end_token and self.tokenizer.eos_token and self.end_token != self.tokenizer.eos_token:
            text = f"the template ends a turn with {self.end_token}, the tokenizer's EOS is {self.tokenizer.eos_token}"
            self.warnings.append(("stop_token_differs", f"{text}; both are exported as stop tokens"))

    def _chat_problems(self) -> list[FinetuneError]:
        if self._template_problem:
            return [self._template_problem]
        if self.template is None:
            text = "the model has no chat template, which conversations need; give one, as --chat-template chatml"
            return [FinetuneError("no_chat_template", text, setting="chat_template")]
        unread = [
            f"chat_template_args: the template reads no {name}" for name in self.template.unread_arguments()
        ]
        found = [
            FinetuneError("setting_without_effect", text, setting="chat_template_args") for text in unread
        ]
        if self.end_token is None:
            text = "the chat template ends the assistant's turn with no special token, so answers would never stop"
            return [*found, FinetuneError("no_stop_token", text, setting="chat_template")]
        failure = _or_error(self._check_known_row)
        return [*found, failure] if isinstance(failure, FinetuneError) else found

    def _check_known_row(self) -> None:
        """Encode a conversation whose mask is known: a library that renders or tokenises otherwise is met here."""
        turns = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "four"}]
        example = self.conversation(turns)[0]
        learned = self.tokens.decoded(
            [token for token, weight in zip(example.ids, example.weights, strict=True) if weight]
        )
        is_answer = learned.endswith(f"four{self.end_token}") and "2+2?" not in learned
        if not is_answer or "2+2?" not in self.tokens.decoded(example.ids):
            text = f"of the known answer 'four' this would be learned: {learned!r}"
            raise FinetuneError("bad_template", text, learned=learned)

    def _one(self, conversation: Conversation, learn: str = "all") -> list[Encoded]:
        outcome = self.encode([conversation], learn)[0]
        if isinstance(outcome, FinetuneError):
            raise outcome
        return outcome

    def _plan(self, conversation: Conversation, learn: str) -> _Plan:
        if conversation.form == "chat":
            return self._chat_plan(conversation, learn)
        if conversation.text is not None:
            return _Plan("text", [_Turn(conversation.text, "")], ())
        if not (conversation.completion or "").strip():
            raise FinetuneError("empty_assistant", "the completion is empty: only the end would be learned")
        prompt, completion = self._prompt_text(conversation), self._without_end(conversation.completion or "")
        neutral = self.tokens.neutral(completion)
        notes = ("special_text",) if BREAK in prompt + neutral else ()
        return _Plan("pair", [_Turn(prompt, continued(neutral))], notes)

    def _chat_plan(self, conversation: Conversation, learn: str) -> _Plan:
        messages, tools = self._turns(conversation), self.tokens.neutral(conversation.tools)
        answers = [place for place, turn in enumerate(messages) if turn["role"] == "assistant"]
        answers = answers[-1:] if learn == "last" else answers
        weights = {place: messages[place].get("weight", 1) for place in answers}
        learned = [place for place, weight in weights.items() if weight > 0]
        if not learned:
            raise FinetuneError("no_supervised_token", "no assistant turn is learned")
        turns = [self._turn(messages, tools, place, weights[place]) for place in learned]
        lost = [_lost_thought(messages[place], turn) for place, turn in zip(learned, turns, strict=True)]
        notes = ["reasoning_dropped"] * sum(lost)
        if BREAK in turns[-1].upto:
            notes.append("special_text")
        if learned[-1] < len(messages) - 1:
            notes.append("turns_after_the_last_learned")
        return _Plan("chat", turns, tuple(notes))

    def _turn(self, messages: list[Message], tools: Tools | None, place: int, weight: float) -> _Turn:
        """Render what stands before a learned turn, and that with the turn; raises what is wrong with the turn."""
        assert self.template is not None, "problems() names a missing template"
        content = messages[place].get("content") or ""
        if not content.strip() and not messages[place].get("tool_calls"):
            text = f"assistant turn {place + 1} is empty: only its end would be learned"
            raise FinetuneError("empty_assistant", text, turn=place + 1)
        if place == 0:
            raise FinetuneError("bad_roles", "the conversation begins with an answer to nothing")
        plain = _unweighted(messages[: place + 1])
        turn = _Turn(
            self.template.render(plain[:-1], tools, opening=True), self.template.render(plain, tools), weight
        )
        if content.split("</think>")[-1].strip() not in turn.answer:
            text = f"the chat template does not write assistant turn {place + 1} as it stands"
            raise FinetuneError("bad_template", text, turn=place + 1)
        return turn

    def _turns(self, conversation: Conversation) -> list[Message]:
        messages = conversation.messages
        if self.system_prompt and not (messages and messages[0]["role"] == "system"):
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        return self.tokens.neutral(messages)

    def _prompt_text(self, conversation: Conversation) -> str:
        """Return the text before the last answer, without the BOS token that pairs get by itself."""
        if conversation.form == "chat":
            assert self.template is not None, "problems() names a missing template"
            messages = self._turns(conversation)
            last = max(
                (place for place, turn in enumerate(messages) if turn["role"] == "assistant"),
                default=len(messages),
            )
            tools = self.tokens.neutral(conversation.tools)
            return self.template.render(_unweighted(messages[:last]), tools, opening=True)
        prompt = conversation.prompt if conversation.text is None else conversation.text
        bos = self.tokenizer.bos_token if self.tokens.bos_ids else None
        return self.tokens.neutral((prompt or "").removeprefix(bos or ""))

    def _examples(self, plan: _Plan, ids: dict[str, list[int]]) -> list[Encoded]:
        if plan.form == "chat":
            examples = self._chat_examples(plan.turns, ids)
        elif plan.form == "pair":
            examples = [self._pair_example(plan.turns[0], ids)]
        else:
            examples = [self._text_example(plan.turns[0].prompt, ids)]
        return [examples[0]._replace(notes=examples[0].notes + plan.notes), *examples[1:]]

    def _pair_example(self, turn: _Turn, ids: dict[str, list[int]]) -> Encoded:
        """Encode prompt and completion apart: the prompt has the ids that it has at inference, and nothing merges across."""
        prompt = self.tokens.bos_ids + ids[turn.prompt]
        answer = [*ids[turn.upto], self.tokenizer.eos_token_id]
        return Encoded(prompt + answer, _first_unlearned([0.0] * len(prompt) + [1.0] * len(answer)))

    def _text_example(self, text: str, ids: dict[str, list[int]]) -> Encoded:
        """Encode a text as it stands, control tokens included; one BOS, and one stop token at the end."""
        tokens = ids[text]
        if self.tokens.bos_ids and tokens[:1] != self.tokens.bos_ids:
            tokens = self.tokens.bos_ids + tokens
        last = max((place for place, token in enumerate(tokens) if token in self.stop_token_ids), default=-1)
        is_ended = last >= 0 and not self.tokens.decoded(tokens[last + 1 :]).strip()
        tokens = tokens[: last + 1] if is_ended else [*tokens, self.tokenizer.eos_token_id]
        return Encoded(tokens, _first_unlearned([1.0] * len(tokens)))

    def _chat_examples(self, turns: list[_Turn], ids: dict[str, list[int]]) -> list[Encoded]:
        """Return one example where every turn, alone and in the whole, has equal ids; else one for each turn."""
        whole = ids[turns[-1].upto]
        weights = [0.0] * len(whole)
        end: int | None = 0
        for turn in turns:
            start, upto = len(ids[turn.prompt]), ids[turn.upto]
            end = self._end(upto, start)
            if end is None or whole[:start] != ids[turn.prompt] or whole[:end] != upto[:end]:
                examples = [self._turn_example(turn, ids) for turn in turns]
                return [
                    examples[0]._replace(notes=("split_conversations",) * (len(turns) > 1)),
                    *examples[1:],
                ]
            weights[start:end] = [turn.weight] * (end - start)
        return [Encoded(whole[:end], _first_unlearned(weights[:end]))]

    def _turn_example(self, turn: _Turn, ids: dict[str, list[int]]) -> Encoded:
        """Return a turn behind the exact ids of its prompt; where a token would reach across, the two are encoded apart."""
        prompt, upto = ids[turn.prompt], ids[turn.upto]
        answer = upto[len(prompt) :]
        if upto[: len(prompt)] != prompt:
            if not turn.upto.startswith(turn.prompt):
                text = "the chat template writes an answer after another text than the one it opens an answer with"
                raise FinetuneError(
                    "template_not_prefix_stable", text, opening=turn.prompt[-80:], written=turn.upto[-200:]
                )
            rest = continued(turn.answer)
            answer = self.tokens.ids([rest])[rest]
        end = self._end(answer, 0)
        if end is None:
            text = "the chat template does not end this assistant turn with a token to stop at"
            raise FinetuneError("no_stop_token", text)
        return Encoded(prompt + answer[:end], _first_unlearned([0.0] * len(prompt) + [turn.weight] * end))

    def _end(self, ids: list[int], start: int) -> int | None:
        """Return the place behind the first stop token from `start` on: what comes after it is never generated."""
        return next(
            (place + 1 for place in range(start, len(ids)) if ids[place] in self.stop_token_ids), None
        )

    def _without_end(self, completion: str) -> str:
        """Return a completion without the stop token that it may end with as text: the token itself follows anyway."""
        for token in (self.tokenizer.eos_token, self.end_token):
            if token and completion.rstrip().endswith(token):
                return completion.rstrip().removesuffix(token)
        return completion


def _or_error(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what the function returns, or the FinetuneError that it raises, so that one row does not hide the others."""
    try:
        return function(*arguments)
    except FinetuneError as error:
        return error


def _own_template(tokenizer: Any, tools: bool) -> str | None:
    """Return the tokenizer's template; of several, the one for tools where there are tools."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        return template.get("tool_use" if tools else "default") or template.get("default")
    return template


def _first_unlearned(weights: list[float]) -> list[float]:
    """Return the weights with the first one 0: nothing stands before the first token from which it could be told."""
    return [0.0, *weights[1:]]


def _unweighted(messages: list[Message]) -> list[Message]:
    """Return the turns as a template gets them."""
    return [{name: value for name, value in turn.items() if name != "weight"} for turn in messages]


def _lost_thought(message: Message, turn: _Turn) -> bool:
    """Whether reasoning that the row has in this turn is not in its text."""
    thoughts = [*_THOUGHT.findall(message.get("content") or ""), message.get("reasoning_content") or ""]
    return any(thought.strip() not in turn.answer for thought in thoughts)

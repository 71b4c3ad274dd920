"""The token ids of an agent's conversation: rendered afresh, or the very ids of an earlier call, continued.

Rule: what was sampled is never tokenised again while the conversation goes on from it.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence

from finetune.data.chat import ChatFormat
from finetune.data.conversation import Message, Tools
from finetune.data.tokens import continued
from finetune.errors import FinetuneError


class Transcript:
    """Renders with the policy's template and tokenizer; any thread may call.

    chat: made for conversations with tools (ChatFormat(..., tools=True)). Raises its problem where it cannot encode them.
    """

    def __init__(self, chat: ChatFormat) -> None:
        if problems := chat.problems():
            raise problems[0]
        assert chat.template is not None, "problems() names a missing template"
        self.chat, self._template = chat, chat.template
        self._lock = threading.Lock()  # tokenizers and their templates are not safe in several threads

    @property
    def stop_ids(self) -> list[int]:
        return self.chat.stop_token_ids

    def text_of(self, completion_ids: Sequence[int], stopped: bool) -> str:
        """Return the text of a completion without the token that ended it."""
        with self._lock:
            return self.chat.tokens.decoded(list(completion_ids[:-1] if stopped else completion_ids))

    def prompt_ids(self, messages: list[Message], tools: Tools | None) -> list[int]:
        """Return the ids that the policy is given to answer the conversation, rendered afresh."""
        with self._lock:
            text = self._rendered(self._system_first(messages), tools, opening=True)
            return self.chat.tokens.ids([text])[text]

    def continued_ids(
        self,
        before: list[Message],
        answer: Message,
        after: list[Message],
        tools: Tools | None,
        ids: Sequence[int],
        stopped: bool,
    ) -> list[int] | None:
        """Return `ids` (prompt and completion of the call that answered `before` with `answer`) and what `after` adds.

        What is added is the end of the turn, where the limit cut it, the turns that follow and the opening of the next
        answer. None where the template writes no such addition.
        """
        with self._lock:
            try:
                added = self._addition([*self._system_first(before), answer], after, tools, stopped)
            except FinetuneError:
                return None
            if added is None:
                return None
            text = continued(added)
            return [*ids, *self.chat.tokens.ids([text])[text]]

    def _addition(
        self, history: list[Message], after: list[Message], tools: Tools | None, stopped: bool
    ) -> str | None:
        """Return the text that follows the last turn of `history` as it was sampled, up to the opening of an answer."""
        end = self.chat.end_token
        assert end is not None, "problems() names a template that ends no turn"
        upto = self._rendered(history, tools, opening=False)
        whole = self._rendered([*history, *after], tools, opening=True)
        place = upto.rfind(end)
        if place < 0 or not whole.startswith(upto):
            # The template writes earlier turns otherwise once others follow: what it adds is told by a short history.
            # The word for the answer is drawn anew: no turn that follows can hold it.
            stand_in = secrets.token_hex(16)
            short = [{"role": "user", "content": "-"}, {**history[-1], "content": stand_in}]
            whole = self._rendered([*short, *after], None, opening=True)
            place = whole.find(end, whole.rfind(stand_in))
            if stand_in not in whole or place < 0:
                return None
        return whole[place + len(end) if stopped else place :]

    def _rendered(self, messages: list[Message], tools: Tools | None, opening: bool) -> str:
        neutral = self.chat.tokens.neutral
        return self._template.render(neutral(messages), neutral(tools), opening)

    def _system_first(self, messages: list[Message]) -> list[Message]:
        system = self.chat.system_prompt
        if system and not (messages and messages[0]["role"] == "system"):
            return [{"role": "system", "content": system}, *messages]
        return messages

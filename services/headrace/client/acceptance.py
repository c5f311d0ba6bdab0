"""Whether a line is accepted: the one rule that both passes over an input apply."""

from __future__ import annotations

from collections import Counter
from typing import Final

from headrace.client.formats import LineDecoder
from headrace.client.items import Item
from headrace.client.problems import wrong
from headrace.client.tasks import TaskMaker
from headrace.client.tokenise import Tokeniser
from headrace.contracts.messages import ChatPrompt

_GROWTH: Final = 3
"""How much longer than its line a task can get, at most, where the line is long enough to matter."""


class Acceptance:
    """Decodes a line and checks what the decoding cannot tell: its size as a message, its chat template.

    A prompt that is too long for the model is accepted: it becomes the outcome `too_long` of that item alone.
    """

    def __init__(self, decoder: LineDecoder, maker: TaskMaker, tokeniser: Tokeniser | None = None) -> None:
        self.maker = maker
        self.tokeniser = tokeniser
        self._decoder = decoder
        # The job's own defaults are part of each task, and of no line.
        self._long_line = (min(maker.large, maker.limit) - maker.size(decoder.nothing)) // _GROWTH - 2_048

    @property
    def labels(self) -> Counter[str]:
        """How many lines had each of the accepted fields that have no effect."""
        return self._decoder.labels

    def item(self, raw: bytes) -> Item:
        """The item of a line that is not blank; raise `InvalidInput` naming the field that refuses it."""
        item = self._decoder.decode(raw)
        if len(raw) > self._long_line:
            self._check_size(item)
        if item.chat and (self.tokeniser is not None or item.template):
            self._check_chat(item)
        return item

    def _check_size(self, item: Item) -> None:
        maker = self.maker
        size = maker.size(item)
        if size > maker.limit:
            raise wrong("", f"too_large: the item has {size:,} bytes; max_item_bytes allows {maker.limit:,}")
        if size > maker.room and (rest := maker.rest(item)) > maker.room:
            what = f"the item has {rest:,} bytes besides its prompt; the broker takes {maker.room:,} at most"
            raise wrong("", f"too_large: {what}")

    def _check_chat(self, item: Item) -> None:
        """Render the conversation if it is rendered here; refuse variables that only a rendering could honour."""
        if self.tokeniser is not None:
            item.rendered = self.tokeniser.render(item)
        tools = isinstance(item.prompt, ChatPrompt) and item.prompt.tools
        if item.template and (item.rendered is None or tools):
            raise wrong(
                "body.chat_template_kwargs",
                "can only be honoured where the client tokenises, for conversations without tools: "
                "give the model's tokenizer with --tokenizer",
            )

"""The second pass over an input: batches of prepared messages, from where an earlier run ended."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from typing import Final, NamedTuple, Self

from headrace.client.acceptance import Acceptance
from headrace.client.inputs import Input
from headrace.client.items import Item
from headrace.client.uploads import Upload
from headrace.contracts.errors import InvalidInput
from headrace.contracts.messages import Prompt
from headrace.mesh.publisher import MAX_BATCH, OutMessage

BATCH_ITEMS: Final = MAX_BATCH - 1
"""Tasks of one atomic batch: its last message is the manifest."""
BATCH_BYTES: Final = 4 << 20
"""Lines of one batch, in bytes: it bounds what is held for batches in flight."""

_ID_BYTES: Final = 11
"""Bytes of a token id in JSON, with its comma, at most."""
_REST_BYTES: Final = 8_192
"""Where a task without its prompt is smaller, its exact size is not needed."""


class Batch(NamedTuple):
    """Prepared tasks: `messages[i]` has index `first + i` and came from line `lines[i]`.

    `uploads` are the prompts that have to lie in the object store before, by index.
    """

    first: int
    messages: list[OutMessage]
    lines: list[int]
    uploads: dict[int, Upload]

    @property
    def end(self) -> int:
        """The index after the last one."""
        return self.first + len(self.messages)

    def after(self, index: int) -> Self:
        """What remains from `index` on."""
        skip = max(0, index - self.first)
        uploads = {i: u for i, u in self.uploads.items() if i >= index}
        return type(self)(self.first + skip, self.messages[skip:], self.lines[skip:], uploads)

    def until(self, count: int) -> Self:
        """The first `count` messages."""
        uploads = {i: u for i, u in self.uploads.items() if i < self.first + count}
        return type(self)(self.first, self.messages[:count], self.lines[:count], uploads)


class Feed:
    """Prepares the items of an input from line `after_line` + 1 and index `first_index` on.

    `skip` are lines that only the first pass could refuse: their custom id stands on an earlier line. `next`
    blocks for as long as it takes to prepare one batch (about ten milliseconds without a tokenizer).
    """

    def __init__(
        self,
        source: Input,
        acceptance: Acceptance,
        *,
        skip: Collection[int] = (),
        after_line: int = 0,
        first_index: int = 0,
    ) -> None:
        self._source = source
        self._acceptance = acceptance
        self._skip = skip
        self._index = first_index
        self._items = self._read(after_line)

    def next(self) -> Batch | None:
        """The next batch; None at the end of the input. `Conflict` if the input was changed."""
        items: list[Item] = []
        lines: list[int] = []
        size = 0
        for item, line, length in self._items:
            items.append(item)
            lines.append(line)
            size += length
            if len(items) == BATCH_ITEMS or size >= BATCH_BYTES:
                break
        if not items:
            return None
        self._source.check_unchanged()
        self._tokenise(items)
        batch = self._batch(items, lines)
        self._index = batch.end
        return batch

    def position(self) -> int:
        """Bytes of the input that are read."""
        return self._source.lines.position()

    def _read(self, after_line: int) -> Iterator[tuple[Item, int, int]]:
        accept, skip = self._acceptance.item, self._skip
        for block in self._source.lines.blocks():
            if len(block.numbers) and block.numbers[-1] <= after_line:
                continue
            for number, raw in zip(block.numbers, block.lines, strict=True):
                if number <= after_line or not raw or raw.isspace() or number in skip:
                    continue
                try:
                    item = accept(raw)
                except InvalidInput:
                    continue  # refused and reported by the first pass
                yield item, number, len(raw)

    def _tokenise(self, items: list[Item]) -> None:
        maker, tokeniser = self._acceptance.maker, self._acceptance.tokeniser
        if tokeniser is None:
            return
        given: list[Prompt] = [item.prompt for item in items]
        tokeniser.tokenise(items)
        for item, prompt in zip(items, given, strict=True):
            # Token ids can take more room than their text, which is what the first pass measured.
            ids = item.prompt_tokens * _ID_BYTES + _REST_BYTES
            if item.prompt is not prompt and ids > maker.limit and maker.size(item) > maker.limit:
                item.prompt = prompt

    def _batch(self, items: list[Item], lines: list[int]) -> Batch:
        maker, first, now = self._acceptance.maker, self._index, time.time_ns() // 1_000
        messages: list[OutMessage] = []
        uploads: dict[int, Upload] = {}
        for index, item in enumerate(items, first):
            message = maker.message(item, index, now)
            if len(message.data) > maker.large:
                short, upload = maker.by_reference(item, index, now)
                if len(short.data) < len(message.data):  # else it is large by its parameters
                    message, uploads[index] = short, upload
            messages.append(message)
        return Batch(first, messages, lines, uploads)

"""`classify`: which of some labels fits a text, chosen by a model whose output is held to them.

A row is `{"text": …, "labels": [two or more]}`, with `instruction` if the question is another one; its value is
`{"label": …}`. The engine behind it must take `structured_outputs.choice` (llamacpp and vllm do): one that does not
(echo, sim) refuses each row as `unsupported_parameter`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Raw, Struct

from headrace.client.problems import from_msgspec
from headrace.contracts.generation import Generation, StructuredOutput
from headrace.contracts.messages import ChatPrompt, Row
from headrace.inference_worker.engines.protocol import Engine, EngineInfo, ItemFailed, Output, Work

VERSION: Final = "1"
INSTRUCTION: Final = "Which label fits the text best? Answer with the label alone."
_Label = Annotated[str, Meta(min_length=1, max_length=256)]


class Question(Struct, frozen=True):
    """A row: `text` to be judged, and the `labels` to choose from."""

    text: Annotated[str, Meta(min_length=1)]
    labels: Annotated[list[_Label], Meta(min_length=2, max_length=256)]
    instruction: Annotated[str, Meta(max_length=65_536)] = INSTRUCTION


class Label(Struct, frozen=True):
    """The answer."""

    label: str


_decode = msgspec.json.Decoder(Question).decode


class ClassifyEngine:
    """Turns rows into conversations for the engine behind it, and its answers into labels."""

    def __init__(self, inner: Engine) -> None:
        self._inner = inner

    @property
    def info(self) -> EngineInfo:
        """The engine's own, for rows."""
        # The rows are text: a client has nothing to tokenise.
        return replace(
            self._inner.info, rows=True, version=VERSION, tokenizer="", tokenizer_fingerprint="", vocab_size=0
        )

    async def start(self) -> None:
        """Load the model."""
        await self._inner.start()

    async def stop(self) -> None:
        """Free it."""
        await self._inner.stop()

    def prepare(self, work: Work) -> Work:
        """The question as the engine takes it; `invalid_row` for a row that is none."""
        prompt = work.prompt
        if not isinstance(prompt, Row):
            raise ItemFailed("invalid_prompt", "classify takes rows: submit with --rows", field="prompt")
        raw = bytes(prompt.value)
        try:
            question = _decode(raw)
        except (msgspec.MsgspecError, ValueError, RecursionError) as e:
            found = from_msgspec(e, raw)
            field = found.field or None
            raise ItemFailed(
                "invalid_row", f"{field}: {found}" if field else str(found), field=field
            ) from None
        if len(set(question.labels)) != len(question.labels):
            raise ItemFailed("invalid_row", "labels: one of them stands there twice", field="labels")
        longest = max(len(label.encode()) for label in question.labels)
        asked = f"{question.instruction}\n\nLabels: {', '.join(question.labels)}\n\nText: {question.text}"
        choice = StructuredOutput(choice=list(question.labels))
        return self._inner.prepare(
            Work(
                id=work.id,
                prompt=ChatPrompt(messages=[{"role": "user", "content": asked}]),
                params=Generation(temperature=0.0, max_tokens=longest + 8, structured_outputs=choice),
                # No token is shorter than a byte, so that no label is cut.
                max_tokens=longest + 8,
                chat=True,
                traceparent=work.traceparent,
                attempt=work.attempt,
            )
        )

    async def run(self, work: Work) -> Output:
        """The label; `no_label` if the model's answer is none of them."""
        output = await self._inner.run(work)
        choice = work.params.structured_outputs
        labels = (choice.choice if choice is not None else None) or []
        text = output.choices[0].text.strip() if output.choices else ""
        found = next((label for label in labels if label.strip() == text), None)
        if found is None:
            raise ItemFailed("no_label", f"the model answered {text[:80]!r}, which is none of the labels")
        return Output(value=Raw(msgspec.json.encode(Label(found))), usage=output.usage)

    def tokens_generated(self) -> int:
        """The engine's own."""
        return self._inner.tokens_generated()

    def stats(self) -> dict[str, Any]:
        """The engine's own."""
        return self._inner.stats()

"""The lines of a file as numbered items, checked as a submit checks them: the same lines get the same index."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from msgspec import Struct

from headrace.client.acceptance import Acceptance
from headrace.client.checking import Checked, Checker
from headrace.client.formats import Form, LineDecoder
from headrace.client.inputs import Input, InputFormat
from headrace.client.problems import InvalidLines
from headrace.client.tasks import TaskMaker
from headrace.contracts.errors import InvalidInput
from headrace.contracts.messages import FunctionSpec
from headrace.contracts.names import Lane
from headrace.contracts.subjects import Subjects
from headrace.forge.local import Numbered
from headrace.mesh.settings import Settings

MAX_PAYLOAD = 1 << 20
"""What a broker takes by default: items beyond it become objects, so that it refuses none."""


class Asked(Struct, frozen=True, kw_only=True):
    """What somebody wants to be run: a function by name, the rows of a file, and how they are to be read."""

    target: str
    file: str
    batching: str | None = None
    input_format: InputFormat = "auto"
    column: str | None = None
    id_column: str | None = None
    skip_bad: bool = False
    lane: Lane = Lane.NORMAL
    job: str | None = None


class LocalSource:
    """Reads an opened input for a run in this process."""

    def __init__(
        self,
        lines: Input,
        spec: FunctionSpec,
        settings: Settings,
        *,
        form: Form,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self._lines = lines
        maker = TaskMaker(
            Subjects(settings.prefix),
            spec,
            job="local",
            lane=Lane.NORMAL,
            tenant=settings.tenant,
            max_payload=MAX_PAYLOAD,
            large=settings.large_item_bytes,
            limit=settings.max_item_bytes,
        )
        self._acceptance = Acceptance(LineDecoder(spec, form=form, defaults=defaults), maker)

    def check(self, *, skip_bad: bool, progress: Callable[[int, int], None]) -> Checked:
        """The first pass over all lines; raise `InvalidLines` unless `skip_bad`."""
        checked = Checker(self._lines, self._acceptance, progress).run({})
        if checked.refused and not skip_bad:
            raise InvalidLines(checked.errors, checked.refused)
        return checked

    def items(self, checked: Checked) -> Iterator[Numbered]:
        """The accepted lines, numbered from 0; `Conflict` if the file was changed since."""
        index = 0
        for block in self._lines.lines.blocks():
            for number, raw in zip(block.numbers, block.lines, strict=True):
                if not raw or raw.isspace() or number in checked.duplicates:
                    continue
                try:
                    item = self._acceptance.item(raw)
                except InvalidInput:
                    continue  # refused and reported by the first pass
                yield Numbered(index, item)
                index += 1
            self._lines.check_unchanged()

"""Tokenising in the client: exact shapes, and work taken off the GPU's machine. Optional.

Needs the extra `tokenizers` and the model's tokenizer as local files (`tokenizer.json`, with
`tokenizer_config.json` or `chat_template.jinja` beside it for conversations).
"""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal

from headrace.client.chat_template import ChatTemplate, load_chat_template
from headrace.client.items import Item
from headrace.contracts.errors import Conflict, InvalidInput
from headrace.contracts.messages import ChatPrompt, FunctionSpec, TextPrompt, TokenPrompt

Where = Literal["auto", "client", "worker"]
"""Where prompts become tokens. `auto`: here, if the function's tokenizer is at hand."""

_FILE: Final = "tokenizer.json"
_FINGERPRINTED: Final = (_FILE, "tokenizer_config.json", "chat_template.jinja")
MAX_IDS: Final = 2**20


def tokenizer_fingerprint(path: Path) -> str:
    """SHA-256 (hex) over the files of a tokenizer, its chat template included, with their names.

    Equal to what an engine registers with its function, for the same model folder.
    """
    folder = path if path.is_dir() else path.parent
    digest = hashlib.sha256()
    for name in _FINGERPRINTED:
        file = folder / name
        if file.is_file():
            digest.update(name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


class Tokeniser:
    """One tokenizer with its chat template; encodes many items at once.

    A completion's prompt gets the special tokens that the model's own tokenizer adds; a conversation's does
    not, since its template prints them (both as vLLM's server does).
    """

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        file = path / _FILE if path.is_dir() else path
        self._tokenizer: Any = Tokenizer.from_file(str(file))
        # A file may carry the padding and cutting of its training; a prompt must stay whole.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.fingerprint = tokenizer_fingerprint(file)
        self._template = load_chat_template(file.parent)
        self._tool_template = load_chat_template(file.parent, tools=True)

    def render(self, item: Item) -> str | None:
        """The text of a conversation; None where this tokenizer has no template. Raise `InvalidInput`."""
        prompt = item.prompt
        if not isinstance(prompt, ChatPrompt):
            return None
        template: ChatTemplate | None = self._tool_template if prompt.tools else self._template
        if template is None:
            return None
        return template.render(prompt.messages, tools=prompt.tools, variables=item.template)

    def tokenise(self, items: list[Item]) -> None:
        """Replace texts and rendered conversations by token ids and estimates by exact counts, in place.

        Conversations with tools keep their form (an engine reads the calls out of the answer, so it must know the
        tools), and get the exact count.
        """
        plain: list[tuple[Item, str]] = []
        chats: list[tuple[Item, str]] = []
        for item in items:
            if isinstance(item.prompt, TextPrompt):
                plain.append((item, item.prompt.text))
            elif item.rendered is not None:
                chats.append((item, item.rendered))
        self._encode(plain, special=True)
        self._encode(chats, special=False)

    def _encode(self, texts: list[tuple[Item, str]], *, special: bool) -> None:
        if not texts:
            return
        encoded = self._tokenizer.encode_batch_fast([text for _, text in texts], add_special_tokens=special)
        for (item, _), found in zip(texts, encoded, strict=True):
            ids: list[int] = found.ids
            item.prompt_tokens = len(ids)
            tools = isinstance(item.prompt, ChatPrompt) and item.prompt.tools
            # What encodes to nothing, or to more than a message may hold, stays text: the worker names the reason.
            if ids and len(ids) <= MAX_IDS and not tools:
                item.prompt = TokenPrompt(ids=ids)


def choose_tokeniser(
    spec: FunctionSpec, where: Where, path: Path | None
) -> tuple[Tokeniser | None, str | None]:
    """The tokeniser to use, if any, and a note for the user where `auto` decided against one.

    Raise `InvalidInput` if one is demanded (by `client` or by `path`) and not there, `Conflict` if it is not the
    function's own.
    """
    if where == "worker":
        if path is not None:
            msg = "a tokenizer is given, but tokenising is left to the worker"
            raise InvalidInput(msg, field="tokenizer")
        return None, None
    demanded = where == "client" or path is not None
    folder = path or (Path(spec.tokenizer) if spec.tokenizer else None)
    if folder is None:
        if demanded:
            msg = f"function {spec.name} names no tokenizer: give one with --tokenizer, or leave it to the worker"
            raise InvalidInput(msg, field="tokenizer", code="no_tokenizer")
        return None, None
    reason = _unusable(folder)
    if reason:
        if demanded:
            raise InvalidInput(reason, field="tokenizer", code="no_tokenizer")
        return None, None
    try:
        found = Tokeniser(folder)
    except Exception as e:  # noqa: BLE001  (tokenizers raises bare Exceptions for files that it cannot read)
        msg = f"the tokenizer in {folder} cannot be read: {str(e)[:200]}"
        if demanded:
            raise InvalidInput(msg, field="tokenizer", code="no_tokenizer") from None
        return None, f"{msg}; the worker tokenises"
    if spec.tokenizer_fingerprint and found.fingerprint != spec.tokenizer_fingerprint:
        msg = (
            f"the tokenizer in {folder} is not that of function {spec.name}: its fingerprint is "
            f"{found.fingerprint[:16]}, registered is {spec.tokenizer_fingerprint[:16]}"
        )
        if demanded:
            raise Conflict(msg, code="other_tokenizer")
        return None, f"{msg}; the worker tokenises"
    return found, None


def _unusable(folder: Path) -> str | None:
    if find_spec("tokenizers") is None or find_spec("jinja2") is None:
        return "tokenising here needs two packages: pip install 'headrace[tokenizers]'"
    file = folder / _FILE if folder.is_dir() else folder
    if not file.is_file() or file.suffix != ".json":
        return f"there is no {_FILE} in {folder}"
    return None

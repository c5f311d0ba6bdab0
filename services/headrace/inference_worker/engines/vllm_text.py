"""Text to token ids and back with the model's own tokenizer and chat template, outside vLLM's loop."""

from __future__ import annotations

import copy
import hashlib
from pathlib import Path
from typing import Any, Final, Literal, cast

from headrace.contracts.messages import ChatPrompt, Choice, Row, TokenPrompt, Usage
from headrace.inference_worker.engines.checks import check_chat, check_ids, flat_messages
from headrace.inference_worker.engines.logprobs import TokenLogprob, openai_form
from headrace.inference_worker.engines.protocol import ItemFailed, Output, Work

# What decides how a client would tokenise for this model.
_FINGERPRINTED: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


class Texts:
    """The model's tokenizer. It is a copy of vLLM's: the two are used by different threads, and a fast tokenizer's
    settings may not be changed in one while the other reads.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)
        self._vocab_size = vocab_size

    def prompt_ids(self, work: Work) -> list[int]:
        """The prompt as ids, cut to its last `truncate_prompt_tokens` if asked. Raise `ItemFailed`."""
        prompt = work.prompt
        if isinstance(prompt, Row):
            raise ItemFailed("invalid_prompt", "a row is for a function, and vllm is a model", field="prompt")
        if isinstance(prompt, TokenPrompt):
            ids = prompt.ids
        elif isinstance(prompt, ChatPrompt):
            ids = self._chat_ids(prompt)
        else:
            ids = self._ids(prompt.text)
        limit = work.params.truncate_prompt_tokens
        if limit is not None:
            ids = ids[-limit:]
        check_ids(ids, self._vocab_size)
        return ids

    def output(self, work: Work, result: Any, prompt_tokens: int) -> Output:
        """A finished RequestOutput of vLLM as ours."""
        choices = [self._choice(work, c) for c in result.outputs]
        if work.params.prompt_logprobs is not None and choices:
            prompt = _prompt_logprobs(result.prompt_logprobs)
            choices = [_with_prompt(choice, prompt) for choice in choices]
        completion = sum(len(c.token_ids) for c in result.outputs)
        cached = result.num_cached_tokens or 0
        usage = Usage(prompt_tokens=prompt_tokens, completion_tokens=completion, cached_tokens=max(0, cached))
        return Output(choices=choices, usage=usage)

    def _ids(self, text: str) -> list[int]:
        if not text:
            raise ItemFailed("invalid_prompt", "prompt is empty", field="prompt")
        return list(self._tokenizer.encode(text))

    def _chat_ids(self, prompt: ChatPrompt) -> list[int]:
        check_chat(prompt)
        try:
            ids = self._tokenizer.apply_chat_template(
                flat_messages(prompt),
                tools=prompt.tools,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
            )
        except Exception as e:
            # A template is its maker's program: it may raise anything, and what it raises is about this chat.
            why = f"the model's chat template refuses the messages: {type(e).__name__}: {e}"
            raise ItemFailed("invalid_prompt", why, field="messages") from e
        return list(ids)

    def _choice(self, work: Work, completion: Any) -> Choice:
        params = work.params
        ids = list(completion.token_ids)
        text: str = completion.text
        if not text and ids and not params.stop:
            text = self._decode(ids, params.skip_special_tokens, params.spaces_between_special_tokens)
        logprobs = None
        if params.logprobs is not None:
            chat = work.chat or isinstance(work.prompt, ChatPrompt)
            tokens = _token_logprobs(ids, completion.logprobs, params.logprobs)
            logprobs = openai_form(tokens, chat=chat)
        reason = cast("Literal['stop', 'length', 'abort']", completion.finish_reason)
        return Choice(
            text=text,
            # `repetition` is vLLM's own way to stop an item before its length; for OpenAI's readers it is a stop.
            finish_reason=reason if reason in ("length", "abort") else "stop",
            token_ids=ids,
            logprobs=logprobs,
            stop_reason=completion.stop_reason,
        )

    def _decode(self, ids: list[int], skip_special: bool, spaces: bool) -> str:  # noqa: FBT001 -- it mirrors vLLM's
        return self._tokenizer.decode(
            ids, skip_special_tokens=skip_special, spaces_between_special_tokens=spaces
        )


def fingerprint(model: str) -> str:
    """SHA-256 over the tokenizer's files in a local model folder; empty for a model that is no folder."""
    folder = Path(model).expanduser()
    found = [folder / name for name in _FINGERPRINTED if (folder / name).is_file()]
    if not found:
        return ""
    digest = hashlib.sha256()
    for path in found:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _token_logprobs(ids: list[int], entries: list[dict[int, Any]] | None, limit: int) -> list[TokenLogprob]:
    """For each position, vLLM gives a map from id to logprob, rank and text: the chosen token and the best ones."""
    tokens: list[TokenLogprob] = []
    for token_id, by_id in zip(ids, entries or [], strict=False):
        ranked = sorted(by_id.values(), key=lambda one: one.rank)[:limit]
        chosen = by_id[token_id]
        top = [(one.decoded_token or "", float(one.logprob)) for one in ranked]
        tokens.append(TokenLogprob(chosen.decoded_token or "", float(chosen.logprob), top))
    return tokens


def _prompt_logprobs(entries: list[dict[int, Any] | None] | None) -> list[Any]:
    """As its server gives them: null for the first token, then a map from id to logprob, rank and text for each."""
    return [
        None
        if by_id is None
        else {
            str(token_id): {"logprob": float(e.logprob), "rank": e.rank, "decoded_token": e.decoded_token}
            for token_id, e in by_id.items()
        }
        for by_id in entries or []
    ]


def _with_prompt(choice: Choice, prompt: list[Any]) -> Choice:
    """OpenAI has no place for the prompt's log probabilities; vLLM's server gives them beside, under this name."""
    return Choice(
        text=choice.text,
        finish_reason=choice.finish_reason,
        token_ids=choice.token_ids,
        logprobs={**(choice.logprobs or {}), "prompt_logprobs": prompt},
        stop_reason=choice.stop_reason,
    )

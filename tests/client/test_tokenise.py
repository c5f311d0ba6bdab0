"""Tokenising in the client, against a tokenizer made here, and chat templates as `transformers` renders them."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from headrace.client.chat_template import ChatTemplate, load_chat_template
from headrace.client.feed import Feed
from headrace.client.inputs import open_input
from headrace.client.tokenise import Tokeniser, choose_tokeniser, tokenizer_fingerprint
from headrace.contracts.codec import TASK
from headrace.contracts.errors import Conflict, InvalidInput
from headrace.contracts.messages import ChatPrompt, FunctionSpec, TextPrompt, TokenPrompt
from headrace.inference_worker.engines.vllm_text import fingerprint
from tests.client.harness import SPEC, acceptance, batch_line, text_line, write

CHATML = """{% for message in messages %}
    {%- if message.role == 'nobody' %}{{ raise_exception('nobody may not speak') }}{% endif %}
{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}
{% endfor %}
{% if thinking is defined and not thinking %}(no thinking){% endif %}
{% if add_generation_prompt %}<|assistant|>{% endif %}"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer with a start token that its post-processor adds, and a chat template."""
    path = tmp_path_factory.mktemp("tokenizer")
    made = Tokenizer(models.BPE(unk_token=None))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>", "<|assistant|>"], initial_alphabet=alphabet
    )
    made.train_from_iterator(["hello world", "the cat sat on the mat"] * 20, trainer)
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made.enable_truncation(4)  # as of its training: a prompt must not be cut
    made.enable_padding(length=16)
    made.save(str(path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}, "chat_template": CHATML}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def spec(folder: Path, **fields: Any) -> FunctionSpec:
    return msgspec.structs.replace(SPEC, tokenizer=str(folder), **fields)


def expected_ids(folder: Path, text: str, *, special: bool) -> list[int]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer.encode(text, add_special_tokens=special).ids


def feed(tmp_path: Path, lines: list[Any], tokeniser: Tokeniser, **options: Any) -> list[Any]:
    """The tasks that `lines` become."""
    with open_input(write(tmp_path / "in.jsonl", lines)) as opened:
        batch = Feed(opened, acceptance(tokeniser=tokeniser, **options)).next()
        assert batch is not None
        return [TASK.decode(m.data) for m in batch.messages]


def test_completions_get_special_tokens_and_conversations_those_of_the_template(
    folder: Path, tmp_path: Path
) -> None:
    chat = [{"role": "user", "content": "hello world " * 4}]
    ids = batch_line(messages=chat)
    text, rendered, given = feed(
        tmp_path, [text_line(prompt="the cat sat"), ids, {"prompt_token_ids": [5, 6]}], Tokeniser(folder)
    )
    assert text.prompt == TokenPrompt(ids=expected_ids(folder, "the cat sat", special=True))
    assert text.prompt.ids[0] == 0
    wanted = f"<|user|>{chat[0]['content']}</s>\n<|assistant|>"
    assert rendered.prompt == TokenPrompt(ids=expected_ids(folder, wanted, special=False))
    assert (rendered.chat, text.chat, rendered.prompt_tokens) == (True, False, len(rendered.prompt.ids))
    assert given.prompt == TokenPrompt(ids=[5, 6])


def test_tools_keep_the_conversation_with_an_exact_count(folder: Path, tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    (task,) = feed(tmp_path, [batch_line(tools=[tool])], Tokeniser(folder))
    assert isinstance(task.prompt, ChatPrompt)
    assert task.prompt_tokens == len(expected_ids(folder, "<|user|>hi</s>\n<|assistant|>", special=False))


def test_variables_of_the_template(folder: Path, tmp_path: Path) -> None:
    line = batch_line(chat_template_kwargs={"thinking": False})
    (task,) = feed(tmp_path, [line], Tokeniser(folder))
    wanted = "<|user|>hi</s>\n(no thinking)<|assistant|>"
    assert task.prompt == TokenPrompt(ids=expected_ids(folder, wanted, special=False))
    raw = json.dumps(line).encode()
    with pytest.raises(InvalidInput, match="--tokenizer"):
        acceptance().item(raw)
    with pytest.raises(InvalidInput, match="messages cannot be set"):
        acceptance(tokeniser=Tokeniser(folder)).item(
            json.dumps(batch_line(chat_template_kwargs={"messages": []})).encode()
        )


def test_a_conversation_that_the_template_refuses_is_a_bad_line(folder: Path) -> None:
    line = json.dumps(batch_line(messages=[{"role": "nobody", "content": "a"}])).encode()
    with pytest.raises(InvalidInput, match="nobody may not speak"):
        acceptance(tokeniser=Tokeniser(folder)).item(line)


def test_text_stays_where_its_ids_would_not_fit(folder: Path, tmp_path: Path) -> None:
    (task,) = feed(tmp_path, [{"prompt": "q" * 5_000}], Tokeniser(folder), limit=8_000)
    assert isinstance(task.prompt, TextPrompt)
    assert task.prompt_tokens == 5_001


# --- choosing ----------------------------------------------------------------------------------------


def test_auto_takes_the_tokenizer_at_hand(folder: Path, tmp_path: Path) -> None:
    assert choose_tokeniser(SPEC, "auto", None) == (None, None)
    assert choose_tokeniser(spec(folder), "worker", None) == (None, None)
    assert choose_tokeniser(spec(tmp_path), "auto", None) == (None, None)
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")
    assert choose_tokeniser(spec(gguf), "auto", None) == (None, None)
    found, note = choose_tokeniser(spec(folder), "auto", None)
    assert found is not None
    assert note is None
    assert choose_tokeniser(SPEC, "auto", folder / "tokenizer.json")[0] is not None


def test_another_tokenizer_is_refused(folder: Path) -> None:
    same = tokenizer_fingerprint(folder)
    assert choose_tokeniser(spec(folder, tokenizer_fingerprint=same), "auto", None)[0] is not None
    other = spec(folder, tokenizer_fingerprint="0" * 64)
    found, note = choose_tokeniser(other, "auto", None)
    assert found is None
    assert "the worker tokenises" in str(note)
    with pytest.raises(Conflict, match="not that of function generate"):
        choose_tokeniser(other, "auto", folder)


def test_the_fingerprint_is_that_of_the_engines(folder: Path) -> None:
    assert tokenizer_fingerprint(folder) == fingerprint(str(folder))
    assert tokenizer_fingerprint(folder / "tokenizer.json") == fingerprint(str(folder))


def test_a_demanded_tokenizer_must_be_there(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="names no tokenizer"):
        choose_tokeniser(SPEC, "client", None)
    with pytest.raises(InvalidInput, match=r"no tokenizer\.json"):
        choose_tokeniser(SPEC, "auto", tmp_path)
    with pytest.raises(InvalidInput, match="left to the worker"):
        choose_tokeniser(SPEC, "worker", folder)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidInput, match="cannot be read"):
        choose_tokeniser(SPEC, "client", tmp_path)


# --- templates ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].content }}", "<s>é<"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "é<"}]'),
        ("{{ messages[0] | tojson(indent=2) }}", '{\n  "role": "user",\n  "content": "é<"\n}'),
        ("{{ strftime_now('%Y') }}", datetime.now().astimezone().strftime("%Y")),
        ("{% for m in messages %}{% if true %}{% break %}{% endif %}x{% endfor %}y", "y"),
        ("{% generation %}{{ messages[0].role }}{% endgeneration %}", "user"),
        ("  {% if true %}\na\n  {% endif %}\nb", "a\nb"),
        ("{{ tools }}{{ documents }}{{ undefined_name }}", "NoneNone"),
    ],
)
def test_the_environment_is_that_of_transformers(source: str, expected: str) -> None:
    template = ChatTemplate(source, {"bos_token": "<s>"})
    assert template.render([{"role": "user", "content": "é<"}]) == expected


@pytest.mark.parametrize(
    "source", ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ 1 // 0 }}"]
)
def test_templates_run_in_a_sandbox(source: str) -> None:
    with pytest.raises(InvalidInput, match="chat template"):
        ChatTemplate(source).render([{"role": "user", "content": "a"}])


def test_arguments_of_tool_calls_are_objects_for_the_template() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    template = ChatTemplate("{{ messages[0].tool_calls[0].function.arguments.a }}")
    assert template.render([{"role": "assistant", "content": None, "tool_calls": [call]}]) == "1"
    assert call["function"]["arguments"] == '{"a": 1}'  # type: ignore[index]


def test_which_template_of_a_folder(tmp_path: Path) -> None:
    assert load_chat_template(tmp_path) is None
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    for tools, text in ((False, "d"), (True, "t")):
        found = load_chat_template(tmp_path, tools=tools)
        assert found is not None
        assert found.render([]) == text
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}")
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    found = load_chat_template(tmp_path)
    assert found is not None
    assert found.render([]) == "</s>"

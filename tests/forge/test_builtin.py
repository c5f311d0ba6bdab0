"""The functions that come with Headrace: an embedding without a library of its own, and labels by an engine."""

from __future__ import annotations

import json
import struct
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from msgspec import Raw

from headrace.contracts.errors import InvalidInput
from headrace.contracts.generation import DEFAULT_GENERATION
from headrace.contracts.messages import ChatPrompt, Row, TextPrompt
from headrace.forge.builtin.static_model import load_static_model, read_vectors
from headrace.inference_worker.engines.classifier import ClassifyEngine
from headrace.inference_worker.engines.echo import EchoEngine
from headrace.inference_worker.engines.llamacpp import LlamaCppEngine
from headrace.inference_worker.engines.options import EngineOptions
from headrace.inference_worker.engines.protocol import ItemFailed, Work

np = pytest.importorskip("numpy", reason="numpy comes with the extra embed")

VOCABULARY = {"[UNK]": 0, "red": 1, "green": 2, "blue": 3}


def safetensors(path: Path, tensors: dict[str, Any], *, cut: int = 0, **metadata: str) -> Path:
    """A file of that format, made by hand."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    data = b""
    for name, array in tensors.items():
        dtype = {"float16": "F16", "float32": "F32", "int64": "I64"}[str(array.dtype)]
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + array.nbytes],
        }
        data += array.tobytes()
    head = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + data[: len(data) - cut])
    return path


def model(folder: Path, vectors: Any) -> Path:
    """A static model of four words in the form of model2vec."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer = Tokenizer(WordLevel(VOCABULARY, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    safetensors(folder / "model.safetensors", {"embeddings": vectors}, made="by hand")
    return folder


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_text_s_vector_is_the_mean_of_its_tokens_vectors(tmp_path: Path, dtype: str) -> None:
    vectors = np.array([[0, 0, 0], [3, 0, 0], [0, 4, 0], [0, 0, 5]], dtype=dtype)
    found = load_static_model(str(model(tmp_path, vectors)))
    assert found.dimensions == 3
    assert found.embed(["red", "red green", "", "none of them", "blue blue blue"]) == [
        [1.0, 0.0, 0.0],
        [0.6, 0.8, 0.0],
        [0.0, 0.0, 0.0],
        [0.0, 0.0, 0.0],
        [0.0, 0.0, 1.0],
    ]


@pytest.mark.parametrize(
    ("tensors", "cut", "said"),
    [
        ({}, 0, "it has 0 matrices"),
        ({"a": np.zeros((2, 2), "float32"), "b": np.zeros((2, 2), "float32")}, 0, "it has 2 matrices"),
        ({"a": np.zeros((2, 2), "int64")}, 0, "cannot be|no model|I64"),
        ({"a": np.zeros((2, 2), "float32")}, 3, "its data is not as long"),
    ],
)
def test_files_that_are_no_model_are_refused(
    tmp_path: Path, tensors: dict[str, Any], cut: int, said: str
) -> None:
    path = safetensors(tmp_path / "m.safetensors", tensors, cut=cut)
    with pytest.raises(InvalidInput, match=said):
        read_vectors(path)


@pytest.mark.parametrize("data", [b"", b"\x00" * 8, b"\xff" * 64, struct.pack("<Q", 5) + b"no js"])
def test_bytes_that_are_no_model_are_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(data)
    with pytest.raises(InvalidInput, match="is no model that embed can read"):
        read_vectors(path)


def test_a_folder_without_a_model_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"one \*\.safetensors and tokenizer\.json"):
        load_static_model(str(tmp_path))


@pytest.mark.skipif(find_spec("wordllama") is None, reason="the weights come with the extra embed")
def test_texts_of_like_meaning_are_close() -> None:
    cat, kitten, market = load_static_model().embed(
        ["the cat sat on the mat", "a kitten is sitting on a rug", "stock markets fell sharply"]
    )

    def close(a: list[float], b: list[float]) -> float:
        return sum(x * y for x, y in zip(a, b, strict=True))

    assert close(cat, cat) == pytest.approx(1, abs=1e-4)
    assert close(cat, kitten) > 0.3 > 0.15 > close(cat, market)


# --- classify --------------------------------------------------------------------------------------


def asked(value: Any) -> Work:
    raw = Raw(json.dumps(value).encode())
    return Work(id="j/0@1", prompt=Row(value=raw), params=DEFAULT_GENERATION, max_tokens=1)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": "x"}, "missing field 'labels'"),
        ({"text": "x", "labels": ["a"]}, "labels: expected array of length >= 2"),
        ({"text": "x", "labels": ["a", "a"]}, "one of them stands there twice"),
        ({"text": "", "labels": ["a", "b"]}, "text: "),
        ("x", "expected object"),
    ],
)
def test_a_row_that_is_no_question_is_refused(row: Any, said: str) -> None:
    engine = ClassifyEngine(EchoEngine(EngineOptions()))
    with pytest.raises(ItemFailed, match=said) as failed:
        engine.prepare(asked(row))
    assert failed.value.error.type == "invalid_row"


def test_an_engine_that_cannot_hold_to_labels_says_so() -> None:
    engine = ClassifyEngine(EchoEngine(EngineOptions()))
    with pytest.raises(ItemFailed) as failed:
        engine.prepare(asked({"text": "x", "labels": ["a", "b"]}))
    assert failed.value.error.type == "unsupported_parameter"
    with pytest.raises(ItemFailed, match="takes rows"):
        engine.prepare(Work(id="i", prompt=TextPrompt(text="x"), params=DEFAULT_GENERATION, max_tokens=1))


@pytest.mark.anyio
@pytest.mark.llamacpp
async def test_labels_by_a_model() -> None:
    """Whatever the model thinks: an answer is always one of the labels, those of several tokens too."""
    engine = ClassifyEngine(LlamaCppEngine(EngineOptions(slots=2)))
    await engine.start()
    try:
        assert engine.info.rows
        labels = ["yes", "a label of several words", 'größer "quoted"']
        for text in ("is it?", "who knows"):
            work = engine.prepare(asked({"text": text, "labels": labels}))
            assert isinstance(work.prompt, ChatPrompt)
            output = await engine.run(work)
            assert output.value is not None
            assert json.loads(bytes(output.value))["label"] in labels
            assert output.usage.completion_tokens > 0
    finally:
        await engine.stop()

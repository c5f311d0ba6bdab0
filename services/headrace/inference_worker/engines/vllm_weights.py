"""The demo's model in the form that vLLM reads: a folder, made once from the demo's GGUF file and kept beside it.

transformers unpacks the weights, and finds the tokenizer and the chat template in the same file. It imports torch,
which takes seconds and a gigabyte that a supervisor should not spend: so it is done in a child, by this very file.
"""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Final

import msgspec
from msgspec import Struct

from headrace.contracts.errors import InvalidInput, Unavailable
from headrace.inference_worker.engines.cache import cache_folder, making
from headrace.inference_worker.engines.weights import SHA256, fetch_demo_weights

FOLDER_NAME: Final = "SmolLM2-135M-Instruct"
MANIFEST: Final = "headrace.json"
FORM: Final = 1
"""Raised when what is made changes: folders of another form are made again."""
PACKAGES: Final = ("torch", "transformers", "gguf", "accelerate")
MAKE_TIMEOUT_S: Final = 900.0

_log = logging.getLogger(__name__)


class Manifest(Struct, frozen=True, kw_only=True):
    """Written last: what the folder was made from, and the bytes of each of its files."""

    form: int
    source_sha256: str
    files: dict[str, int]


def demo_model_folder(
    cache_dir: Path | str | None = None, *, progress: Callable[[str], None] | None = None
) -> Path:
    """The demo's model as a folder for vLLM (270 MB), made if it is not there yet; half a minute, blocking.

    Two makers at once make it once. `progress` is given one line for each stage. Raise `InvalidInput` if a package
    is missing that making it needs, `Unavailable` if it cannot be made or kept.
    """
    say = progress or _log.info
    folder = Path(cache_dir) if cache_dir is not None else cache_folder()
    target = folder / FOLDER_NAME
    if is_whole(target):
        return target
    _check_packages()
    weights = fetch_demo_weights(folder, progress=say)
    try:
        with making(target) as (scratch, lock):
            if not is_whole(target):
                say(f"making the demo's model for vLLM out of {weights.name}, once")
                made = scratch / "made"
                made.mkdir()
                _make_in_child(weights, made, lock, say)
                if target.exists():
                    target.rename(scratch / "old")
                made.rename(target)
                say(f"the demo's model for vLLM is ready: {target}")
    except OSError as e:
        raise Unavailable(
            f"the demo's model for vLLM cannot be kept in {folder}: {e}; set HEADRACE_CACHE to another folder, "
            "or give --model FOLDER of a model for vLLM",
            code="weights",
        ) from e
    return target


def is_whole(folder: Path) -> bool:
    """Whether the folder was made to its end, from these weights, and its files are as long as they were."""
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
        sizes = {name: (folder / name).stat().st_size for name in manifest.files}
    except (OSError, msgspec.MsgspecError):
        return False
    return manifest.form == FORM and manifest.source_sha256 == SHA256 and manifest.files == sizes


def _check_packages() -> None:
    for name in PACKAGES:
        if find_spec(name) is None:
            raise InvalidInput(
                f"engine vllm needs --model: its demo model is made by the package {name}, which is not installed "
                f"here (pip install {name})",
                field="model",
                code="engine_missing",
            )


def _make_in_child(weights: Path, target: Path, lock: int, say: Callable[[str], None]) -> None:
    # -P: a file in the current folder must not stand in for a module.
    command = [sys.executable, "-P", "-m", __name__, str(weights), str(target)]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=_environment(),
            # As long as it runs, nobody else makes one.
            pass_fds=(lock,),
        )
        watchdog = threading.Timer(MAKE_TIMEOUT_S, process.kill)
        watchdog.start()
        try:
            with process:
                output: IO[str] = process.stdout  # pyright: ignore[reportAssignmentType]  # stdout=PIPE
                try:
                    for line in output:
                        say(line.strip())
                except BaseException:
                    process.kill()
                    raise
        finally:
            watchdog.cancel()
        if process.returncode:
            errors.seek(0)
            lines = [line.strip() for line in errors.read().splitlines() if line.strip()]
            why = lines[-1] if lines else f"its process ended with status {process.returncode}"
            raise Unavailable(
                f"the demo's model for vLLM could not be made: {why[:300]}; give --model FOLDER of a model for vLLM",
                code="weights",
            )


def _environment() -> dict[str, str]:
    quiet = {
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TQDM_DISABLE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    return {**os.environ, **quiet}


# --- in the child -----------------------------------------------------------------------------------


def _make(weights: Path, target: Path) -> None:
    # By name: this file is checked on machines that have none of it.
    transformers: Any = importlib.import_module("transformers")
    torch: Any = importlib.import_module("torch")
    where: dict[str, Any] = {"gguf_file": weights.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(weights.parent, **where)
    if not tokenizer.chat_template:
        raise ValueError(f"{weights} has no chat template")
    print("unpacking its weights")  # noqa: T201
    if hasattr(transformers, "GgufConfig"):
        # Versions without it always unpack.
        where["quantization_config"] = transformers.GgufConfig(gguf_file=weights.name, dequantize=True)
    # bfloat16 is ample for 4-bit weights, at half the space. In which type they are used is vLLM's setting.
    model = transformers.AutoModelForCausalLM.from_pretrained(weights.parent, dtype=torch.bfloat16, **where)
    print("writing the model's folder")  # noqa: T201
    # Else vLLM would take the plain weights for packed ones.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    _seal(target)


def _seal(target: Path) -> None:
    """All on disk, then the manifest, so that a folder that has one is whole after a crash too."""
    files: dict[str, int] = {}
    for path in sorted(p for p in target.iterdir() if p.is_file()):
        path.chmod(0o644)  # the weights are written for their owner alone, and a cache may be shared
        files[path.name] = path.stat().st_size
        _sync(path)
    manifest = target / MANIFEST
    manifest.write_bytes(msgspec.json.encode(Manifest(form=FORM, source_sha256=SHA256, files=files)))
    _sync(manifest)
    _sync(target)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _end_with_parent() -> None:
    # Its writing end closes when the parent is gone, however it went.
    while os.read(0, 64):
        pass
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _make(Path(sys.argv[1]), Path(sys.argv[2]))

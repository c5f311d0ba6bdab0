"""How vLLM is set up, as far as that goes without it; and the keeper of its child process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from headrace.contracts.errors import InvalidInput
from headrace.inference_worker.engines import vllm_args
from headrace.inference_worker.engines.checks import GENERATION_FIELDS
from headrace.inference_worker.engines.options import EngineOptions
from headrace.inference_worker.engines.reaper import Reaper
from headrace.inference_worker.engines.vllm_args import read_setup, set_environment
from headrace.inference_worker.engines.vllm_params import ELSEWHERE, SAME, refusal


def setup(**extra: str) -> vllm_args.VllmSetup:
    return read_setup(EngineOptions(model="some/model", slots=8, context=128, extra=extra))


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_every_field_of_generation_is_placed() -> None:
    assert sorted((*SAME, *ELSEWHERE)) == sorted(GENERATION_FIELDS)


def test_without_a_gpu_it_steps_in_float32() -> None:
    made = setup()
    assert (made.mode, made.gpu) == ("step", False)
    assert made.arguments["dtype"] == "float32"
    assert made.arguments["max_num_seqs"] == 8
    assert made.arguments["max_model_len"] == 128


def test_with_a_gpu_it_has_a_process_and_the_models_own_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_args, "has_gpu", lambda: True)
    made = read_setup(EngineOptions(model="m"))
    assert (made.mode, made.gpu) == ("async", True)
    assert "dtype" not in made.arguments
    assert made.arguments["max_num_seqs"] == vllm_args.GPU_SEQS


def test_arguments_are_read_by_their_form() -> None:
    made = setup(
        mode="async",
        dtype="bfloat16",
        kv_cache_memory_bytes="1024",
        gpu_memory_utilization="0.8",
        enforce_eager="true",
        hf_overrides='{"a": 1}',
        quantization="None",
    )
    assert made.mode == "async"
    want: dict[str, Any] = {
        "dtype": "bfloat16",
        "kv_cache_memory_bytes": 1024,
        "gpu_memory_utilization": 0.8,
        "enforce_eager": True,
        "hf_overrides": {"a": 1},
        "quantization": None,
    }
    assert want.items() <= made.arguments.items()


def test_adapters_are_named_paths() -> None:
    made = setup(lora_adapters="a=/x, b=/y")
    assert made.adapters == {"a": "/x", "b": "/y"}
    assert made.arguments["enable_lora"] is True


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        ({"mode": "thread"}, "vllm.mode"),
        ({"seed": "1"}, "vllm.seed"),
        ({"lora_adapters": "a"}, "vllm.lora_adapters"),
        ({"lora_adapters": "a=/x,a=/y"}, "vllm.lora_adapters"),
    ],
)
def test_a_bad_setting_is_named(extra: dict[str, str], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        setup(**extra)
    assert caught.value.field == field


def test_it_needs_a_model() -> None:
    with pytest.raises(InvalidInput) as caught:
        read_setup(EngineOptions())
    assert caught.value.field == "model"


def test_the_environment_yields_to_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_NO_USAGE_STATS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    set_environment(read_setup(EngineOptions(model="m", threads=3)))
    assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert os.environ["OMP_NUM_THREADS"] == "3"
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert os.environ["VLLM_NO_USAGE_STATS"] == "1"


class _Named(ValueError):
    parameter = "top_p"


@pytest.mark.parametrize(
    ("error", "type_", "field"),
    [
        (_Named("top_p is out of range"), "invalid_parameter", "top_p"),
        (ValueError("Token id 9 is out of vocabulary"), "invalid_token", "prompt_token_ids"),
        (ValueError("prompt is longer than the maximum model length of 4"), "too_long", "prompt"),
        (ValueError("Failed to convert the grammar"), "invalid_parameter", "structured_outputs"),
        (ValueError("something else"), "invalid_parameter", None),
    ],
)
def test_refusals_have_types(error: ValueError, type_: str, field: str | None) -> None:
    made = refusal(error).error
    assert (made.type, made.field) == (type_, field)


# --- the reaper -------------------------------------------------------------------------------------
_PARENT = """
import subprocess, sys, time
from headrace.inference_worker.engines.reaper import Reaper
child = subprocess.Popen(["sleep", "60"])
reaper = Reaper()
reaper.add(child.pid)
print(child.pid, flush=True)
time.sleep(60)
"""


def _gone(pid: int, within_s: float = 5.0) -> bool:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
            # Dead, and not yet waited for by whoever inherited it.
            if Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.01)
    return False


def test_a_killed_parent_takes_its_child_with_it() -> None:
    parent = subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert _gone(child)


def test_a_closed_reaper_lets_be() -> None:
    child = subprocess.Popen(["sleep", "60"])
    reaper = Reaper()
    reaper.add(child.pid)
    reaper.add(child.pid)
    reaper.close()
    reaper.close()
    time.sleep(0.05)
    assert child.poll() is None
    child.kill()
    child.wait()

"""The command's small parts: exit codes, flags made of settings, pace, layout, lock, tables."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.cli import setting_flags
from headrace.cli.demo_report import read_prompts, shorten
from headrace.cli.exit_codes import EPILOG, Exit, exit_code_of
from headrace.cli.failures import describe
from headrace.cli.output import clock_text, shown
from headrace.cli.reference import main
from headrace.cli.sql import unique_names
from headrace.cli.supervisor.choices import engine_choice, model_choice
from headrace.cli.supervisor.layout import Layout, MeshState, choose_port, port_is_free
from headrace.cli.supervisor.lock import DirLock, lock_holder
from headrace.cli.target import find_settings
from headrace.cli.watch_view import straggler_text
from headrace.cli.watching import Pace, exit_of
from headrace.contracts.api import JobStatus
from headrace.contracts.errors import Conflict, InvalidInput, NotFound, Refused, Unavailable
from headrace.inference_worker.engines import vllm_weights
from headrace.mesh.callee_settings import GatewaySettings
from headrace.mesh.forge_settings import ForgeSettings
from headrace.mesh.settings import AgentSettings, CompletionSettings, Settings, WorkerSettings, read_mesh_file


def status(**fields) -> JobStatus:
    return JobStatus(**{"job": "j", "state": "sealed", "submitted": 100} | fields)


# --- exit codes and errors --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidInput("x"), 2),
        (NotFound("x"), 1),
        (Refused("x"), 1),
        (Conflict("x"), 1),
        (Unavailable("x"), 1),
    ],
)
def test_each_kind_of_error_has_its_exit_code(error, code):
    assert exit_code_of(error) == code


def test_every_exit_code_is_in_the_epilog():
    assert all(f"{int(code):>3}  " in EPILOG for code in Exit)


def test_an_error_for_scripts_names_field_and_line_where_there_are_some():
    assert describe(InvalidInput("no", field="f", line=3)) == {
        "code": "invalid",
        "message": "no",
        "field": "f",
        "line": 3,
    }
    assert describe(NotFound("no")) == {"code": "not_found", "message": "no"}


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"state": "completed", "ok": 100}, 0),
        ({"state": "completed_with_errors", "ok": 99, "failed": 1}, 3),
        ({"state": "completed_with_errors", "dead": 1}, 3),
        ({"state": "cancelled", "failed": 1}, 4),
    ],
)
def test_what_the_end_of_a_job_means(fields, code):
    assert exit_of(status(**fields)) == code


# --- settings as flags ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "owner"),
    [
        ("worker", WorkerSettings),
        ("completion", CompletionSettings),
        ("gateway", GatewaySettings),
        ("agent", AgentSettings),
        ("forge", ForgeSettings),
        (None, None),
    ],
)
def test_every_setting_is_a_flag(section, owner):
    names = {p.name for p in setting_flags.parameters(section)}
    shared = set(Settings.__struct_fields__) - {
        "dir", "worker", "completion", "gateway", "agent", "forge", "policy", "callees", "functions",
    }  # fmt: skip
    assert names == shared | set(owner.__struct_fields__ if owner else ())


def test_flags_become_dotted_keys_and_pairs():
    given = {"url": "nats://x:1", "engine": "sim", "model": None, "engine_options": ["a=1", "b=x=y"]}
    flags = setting_flags.flags_of("worker", given)
    assert flags == {
        "url": "nats://x:1",
        "worker.engine": "sim",
        "worker.model": None,
        "worker.engine_options": {"a": "1", "b": "x=y"},
    }


def test_an_engine_option_without_a_value_is_refused():
    with pytest.raises(InvalidInput, match="'seed' is not NAME=VALUE"):
        setting_flags.flags_of("worker", {"engine_options": ["seed"]})


# --- finding the mesh -------------------------------------------------------------------------------


@pytest.fixture
def meshes(tmp_path, monkeypatch):
    """Two folders that know a mesh each; the current one has the first as ./.headrace."""
    monkeypatch.chdir(tmp_path)
    for name in ("HEADRACE_NATS_URL", "HEADRACE_DIR"):
        monkeypatch.delenv(name, raising=False)
    for folder, port in ((tmp_path / ".headrace", 1111), (tmp_path / "other", 2222)):
        folder.mkdir()
        Layout(folder).write_state(MeshState(url=f"nats://127.0.0.1:{port}", port=port))
    return tmp_path


def test_the_url_comes_from_flag_then_folder_then_environment_then_the_current_folder(meshes, monkeypatch):
    assert find_settings(None, None).url == "nats://127.0.0.1:1111"
    monkeypatch.setenv("HEADRACE_NATS_URL", "nats://env:3")
    assert find_settings(None, None).url == "nats://env:3"
    assert find_settings(meshes / "other", None).url == "nats://127.0.0.1:2222"
    assert find_settings(meshes / "other", "nats://flag:4").url == "nats://flag:4"


def test_no_mesh_is_said_with_what_to_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEADRACE_NATS_URL", raising=False)
    with pytest.raises(NotFound, match=r"no mesh found.*headrace up.*--dir.*--url") as caught:
        find_settings(None, None)
    assert caught.value.code == "no_mesh"


# --- folder, port, lock -----------------------------------------------------------------------------


def test_a_port_is_picked_once_and_remembered(tmp_path):
    layout = Layout(tmp_path)
    port = choose_port(layout, None)
    layout.write_state(MeshState(url=f"nats://127.0.0.1:{port}", port=port, pids={"worker-1": 7}))
    assert choose_port(layout, None) == port
    assert read_mesh_file(tmp_path).port == port
    assert json.loads((tmp_path / "mesh.json").read_text())["pids"] == {"worker-1": 7}


def test_a_port_in_use_is_refused_with_what_to_do(tmp_path):
    layout = Layout(tmp_path)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        assert not port_is_free(port)
        with pytest.raises(Refused, match=f"port {port} is in use.*--port"):
            choose_port(layout, port)
        layout.write_state(MeshState(url="", port=port))
        with pytest.raises(Refused, match=r"which .* had before"):
            choose_port(layout, None)
    assert choose_port(layout, None) == port


def test_a_folder_has_one_supervisor_and_the_second_is_told_its_pid(tmp_path):
    lock = DirLock(tmp_path)
    assert lock_holder(tmp_path) is None
    lock.acquire()
    assert lock_holder(tmp_path) == os.getpid()
    with pytest.raises(Conflict, match=f"already runs in .*pid {os.getpid()}"):
        DirLock(tmp_path).acquire()
    lock.release()
    lock.release()
    assert lock_holder(tmp_path) is None


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match="cannot use"):
        Layout(tmp_path / "file" / "mesh").create()


def test_engine_and_model_are_as_asked_then_configured_then_as_last_time(tmp_path, monkeypatch):
    for name in ("HEADRACE_WORKER_ENGINE", "HEADRACE_WORKER_MODEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "own.gguf"
    model.write_bytes(b"GGUF")
    assert engine_choice(None, tmp_path) == "llamacpp"
    Layout(tmp_path).write_state(MeshState(url="", port=1, engine="llamacpp", model=str(model)))
    assert model_choice("llamacpp", None, tmp_path) == str(model)
    assert model_choice("echo", None, tmp_path) is None
    Layout(tmp_path).write_state(MeshState(url="", port=1, engine="sim"))
    assert engine_choice(None, tmp_path) == "sim"
    (tmp_path / "headrace.toml").write_text('[worker]\nengine = "vllm"\n')
    monkeypatch.setenv("HEADRACE_WORKER_ENGINE", "echo")
    assert engine_choice(None, tmp_path) == "echo"
    assert engine_choice("sim", tmp_path) == "sim"
    with pytest.raises(InvalidInput, match=r"/nowhere/m\.gguf does not exist"):
        model_choice("llamacpp", "/nowhere/m.gguf", tmp_path)
    # A name may be one that vLLM can fetch; its demo model is made by packages that come with it.
    assert model_choice("vllm", "owner/name", tmp_path) == "owner/name"
    with pytest.raises(InvalidInput, match=r"/nowhere/model does not exist"):
        model_choice("vllm", "/nowhere/model", tmp_path)
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(vllm_weights, "find_spec", lambda _: None)
    with pytest.raises(InvalidInput, match=r"engine vllm needs --model.*pip install torch"):
        model_choice("vllm", None, tmp_path)


# --- pace, tables, texts ----------------------------------------------------------------------------


def test_pace_is_taken_over_the_last_seconds():
    pace = Pace(window_s=10)
    assert pace.eta_s(status()) is None
    for second in range(31):
        pace.add(
            status(ok=second if second < 20 else 20 + (second - 20) * 4, tokens_out=second * 50),
            float(second),
        )
    assert pace.items_per_s == pytest.approx(4, rel=0.2)
    assert pace.tokens_per_s == pytest.approx(50)
    assert pace.eta_s(status(ok=60)) == pytest.approx(10, rel=0.2)


def test_pace_of_a_job_that_stands_still_has_no_eta():
    pace = Pace()
    pace.add(status(ok=5), 0.0)
    pace.add(status(ok=5), 5.0)
    assert pace.eta_s(status(ok=5)) is None


def test_the_oldest_running_item_is_shown():
    assert (
        straggler_text(status(running=1, oldest_running_us=1_000_000), now_us=13_000_000)
        == "oldest running item: 12.0 s"
    )
    assert straggler_text(status(running=0, oldest_running_us=1)) == ""


def test_durations_and_cells_for_people():
    assert [clock_text(s) for s in (None, 3.21, 247, 7500)] == ["-", "3.2 s", "4 m 07 s", "2 h 05 m"]
    assert [shown(v) for v in (None, True, 1234567, 0.5, "x", [1, "a"])] == [
        "",
        "yes",
        "1,234,567",
        "0.5",
        "x",
        '[1,"a"]',
    ]


def test_repeated_column_names_lose_no_value():
    assert unique_names(["a", "b", "a"]) == ["a", "b", "a_2"]


def test_shorten_cuts_at_a_word():
    assert shorten("one\n two  three", 100) == "one two three"
    assert shorten("one two three", 9) == "one two …"


def test_the_demo_reads_what_each_line_asks(tmp_path):
    lines = [
        {
            "custom_id": "a",
            "body": {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]},
        },
        {"custom_id": "b", "body": {"prompt": "go on"}},
    ]
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert read_prompts(path) == {"a": "hi", "b": "go on"}


# --- starting fast ----------------------------------------------------------------------------------


def test_the_command_loads_nothing_heavy_for_its_help():
    heavy = "nats duckdb vllm torch xllamacpp tokenizers pyarrow opentelemetry httpx"
    code = f"import sys, headrace.cli.main; print([m for m in {heavy!r}.split() if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert out.stdout.strip() == "[]"


# --- the reference ----------------------------------------------------------------------------------


def test_the_reference_in_docs_is_current():
    docs = Path(__file__).parents[2] / "docs" / "cli.md"
    assert main([str(docs), "--check"]) == 0, "run python -m headrace.cli.reference docs/cli.md"

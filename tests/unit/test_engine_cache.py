"""One of several makers makes, and what killed processes leave behind goes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.inference_worker.engines.cache import making
from headrace.inference_worker.engines.socket_folder import PREFIX, YOUNG_S, SocketFolder

OLD_S = 2 * YOUNG_S


def test_makers_take_turns_and_leave_no_scratch(tmp_path: Path) -> None:
    target, made, inside = tmp_path / "cache" / "it", [], threading.Semaphore(1)

    def make() -> None:
        with making(target) as (scratch, _):
            assert inside.acquire(blocking=False)
            (scratch / "part").write_text("x")
            if not target.exists():
                made.append(1)
                (scratch / "part").rename(target)
            inside.release()

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (made, target.read_text()) == ([1], "x")
    assert sorted(p.name for p in target.parent.iterdir()) == ["it", "it.lock"]


def test_the_scratch_folder_of_a_killed_maker_is_removed_by_the_next(tmp_path: Path) -> None:
    target = tmp_path / "it"
    run = (
        "import os, sys; from pathlib import Path; from headrace.inference_worker.engines.cache import making\n"
        "with making(Path(sys.argv[1])): os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", run, target], check=False).returncode == -signal.SIGKILL
    assert len(list(tmp_path.glob(".make-*"))) == 1
    with making(target) as (scratch, _):
        assert list(tmp_path.glob(".make-*")) == [scratch]


def test_the_lock_is_held_for_as_long_as_a_child_that_makes(tmp_path: Path) -> None:
    target, entered = tmp_path / "it", threading.Event()
    with making(target) as (_, lock):
        child = subprocess.Popen(["sleep", "60"], pass_fds=(lock,))

    def make() -> None:
        with making(target):
            entered.set()

    thread = threading.Thread(target=make)
    thread.start()
    assert not entered.wait(0.3)
    child.kill()
    child.wait()
    thread.join(10)
    assert entered.is_set()


# --- the folder of a socket -------------------------------------------------------------------------
@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder with a short path, as sockets need."""
    with tempfile.TemporaryDirectory(prefix="hr-", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def age(folder: Path) -> None:
    then = folder.stat().st_mtime - OLD_S
    os.utime(folder, (then, then))


def test_it_is_private_and_goes_with_close(base: Path) -> None:
    folder = SocketFolder()
    assert folder.path.parent == base
    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.close()
    folder.close()
    assert list(base.iterdir()) == []


def test_what_a_killed_process_left_is_removed_by_the_next(base: Path) -> None:
    run = (
        "import os, tempfile; from headrace.inference_worker.engines.socket_folder import SocketFolder\n"
        "(SocketFolder().path / 'llama.sock').touch(); os.kill(os.getpid(), 9)"
    )
    environment = {**os.environ, "TMPDIR": str(base)}
    assert subprocess.run([sys.executable, "-c", run], env=environment, check=False).returncode < 0
    (orphan,) = base.iterdir()
    young = SocketFolder()
    assert orphan.exists()  # it might be one that is not locked yet
    age(orphan)
    age(young.path)
    last = SocketFolder()
    assert sorted(base.iterdir()) == sorted([young.path, last.path])
    young.close()
    last.close()


def test_what_is_not_ours_stays(base: Path) -> None:
    (base / f"{PREFIX}file").touch()
    (base / "elsewhere").mkdir()
    (base / f"{PREFIX}link").symlink_to(base / "elsewhere")
    SocketFolder().close()
    assert len(list(base.iterdir())) == 3


def test_a_deep_temporary_folder_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 60)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    folder = SocketFolder()
    assert len(str(folder.path / "llama.sock")) < 100
    folder.close()

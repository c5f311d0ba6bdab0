"""What the numbers were measured on, and with which versions."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from importlib import metadata
from pathlib import Path

import psutil

from headrace.mesh.server import find_server_binary, server_version

ROOT = Path(__file__).resolve().parents[2]


def describe(vllm: str) -> dict[str, str]:
    """Machine and versions by name; `vllm` is what is known of it already."""
    load = ", ".join(f"{x:.2f}" for x in os.getloadavg())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "CPU": f"{_cpu()}, {cores} cores",
        "memory": f"{psutil.virtual_memory().total / 2**30:.1f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
        "load before": f"{load} (1, 5, 15 minutes)",
        "Python": platform.python_version(),
        "nats-server": ".".join(map(str, server_version(find_server_binary()))),
        "nats-py": _version("nats-py"),
        "duckdb": _version("duckdb"),
        "msgspec": _version("msgspec"),
        "uvloop": _version("uvloop"),
        "vllm": vllm,
        "headrace": f"{_version('headrace')} {_commit()}",
        "when": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    }


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    """The commit, with `+` if the tree differs from it."""
    try:
        head = _git("rev-parse", "--short", "HEAD")
        return f"({head}{'+' if _git('status', '--porcelain', '--untracked-files=no') else ''})"
    except (OSError, subprocess.CalledProcessError):
        return ""


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True, timeout=10
    ).stdout.strip()

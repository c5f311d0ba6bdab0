"""LiteLLM's proxy as it comes from PyPI, in a process of its own: its defaults, one worker, no database."""

from __future__ import annotations

import os
import secrets
import subprocess
import time
from pathlib import Path

import httpx

from headrace.mesh.server import free_port

READY_S = 120.0
CONFIG = """model_list:
  - model_name: m
    litellm_params:
      model: openai/m
      api_base: {url}
      api_key: none
"""


class Proxy:
    """The proxy in front of the callee at `url`; killed and started again as a test of others is.

    `python` is the interpreter of an environment of its own:
    `python3 -m venv FOLDER && FOLDER/bin/pip install 'litellm[proxy]'`.
    """

    key = f"sk-{secrets.token_hex(16)}"
    """What callers show: it starts with no other way in than a key."""

    def __init__(self, python: Path, folder: Path, url: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.log = folder / "litellm.log"
        config = folder / "litellm.yaml"
        config.write_text(CONFIG.format(url=url), "utf-8")
        command = str(python.with_name("litellm"))
        self._command = [command, "--config", str(config), "--host", "127.0.0.1", "--port", str(self.port)]
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Process id; 0 if it does not run."""
        return self._process.pid if self._process is not None and self._process.poll() is None else 0

    @staticmethod
    def version(python: Path) -> str:
        """Its version, as its environment has it."""
        asked = "import importlib.metadata as m, sys; print(m.version('litellm'), 'on Python', sys.version.split()[0])"
        return subprocess.run(
            [str(python), "-c", asked], capture_output=True, text=True, check=True
        ).stdout.strip()

    def start(self) -> None:
        """Start it, and return when it says that it lives; raise `RuntimeError` with the end of its log else."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("HEADRACE_", "LITELLM_"))}
        # Its price list comes with it; the newer one would be fetched from elsewhere.
        environment |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": self.key}
        environment |= {"NO_PROXY": "127.0.0.1", "HOME": str(self._folder)}
        environment.pop("PYTHONPATH", None)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                cwd=self._folder,
            )
        deadline = time.monotonic() + READY_S
        while not self.answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(
                    f"LiteLLM did not start; its log ends with:\n{self.log.read_text()[-2_000:]}"
                )
            time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def answers(self) -> bool:
        """Whether it says that it lives."""
        try:
            return httpx.get(f"{self.url}/health/liveliness", timeout=2).is_success
        except httpx.HTTPError:
            return False

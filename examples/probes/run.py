"""Documents to probe questions, in one command: a mesh is started, the pipeline run and proved, Parquet written.

    python examples/probes/run.py [--out probes.parquet] [--documents FILE] [--dir DIR] [--engine llamacpp|echo|vllm]

The model is the small one of `headrace demo`, on the CPU (93 MB, fetched once); `--model` takes any other. What was
done is kept in `--dir`: the same command again goes on where it ended.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
HEADRACE = str(Path(sys.executable).parent / "headrace")
READY_S = 600.0


def arguments() -> argparse.Namespace:
    """What the command was told."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("probes.parquet"))
    parser.add_argument("--documents", type=Path, default=HERE / "documents.jsonl")
    parser.add_argument("--dir", type=Path, default=Path(".headrace/probes"))
    parser.add_argument("--engine", default="llamacpp")
    parser.add_argument("--model", default=None)
    return parser.parse_args()


def start(chosen: argparse.Namespace) -> subprocess.Popen[str]:
    """`headrace up` with a model's worker and one for the functions; returns when it is ready."""
    command = [HEADRACE, "up", "--dir", str(chosen.dir.resolve()), "--engine", chosen.engine]
    command += ["--functions", "probes,embed", *(["--model", chosen.model] if chosen.model else [])]
    # The functions are found by their module, so its folder is where the mesh runs.
    mesh = subprocess.Popen(command, cwd=HERE, stdout=subprocess.PIPE, text=True)
    until = time.monotonic() + READY_S
    for line in mesh.stdout or ():
        print(line, end="", file=sys.stderr)
        if line.startswith("ready "):
            return mesh
        if time.monotonic() > until:
            break
    mesh.terminate()
    raise SystemExit("the mesh does not start")


def headrace(folder: Path, *command: str, fine: tuple[int, ...] = (0,)) -> str:
    """One command against the mesh; its standard output. Ends with it if its exit code is none of `fine`."""
    done = subprocess.run(
        [HEADRACE, *command, "--dir", str(folder)], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode not in fine:
        print(done.stdout, file=sys.stderr)
        raise SystemExit(done.returncode)
    return done.stdout


def main() -> None:
    """Start, run, prove, write, show, stop."""
    chosen = arguments()
    folder = chosen.dir.resolve()
    mesh = start(chosen)
    try:
        documents = str(chosen.documents.resolve())
        run = ("pipeline", "run", str(HERE / "probes.toml"), "--input", documents, "--wait")
        headrace(folder, *run, fine=(0, 3))  # 3: a row failed alone, the others went on
        print(headrace(folder, "pipeline", "audit", "probes"))
        out = str(chosen.out.resolve())
        headrace(folder, "results", "probes-probe", "--format", "parquet", "--out", out)
        lines = headrace(folder, "results", "probes-probe").splitlines()
        (collected,) = headrace(folder, "results", "probes-distinct").splitlines()
        for line in lines[:5]:
            probe = json.loads(line)["output"]
            print(f"{probe['title']}: {probe['question'].strip()}")
        left = json.loads(collected)["output"]
        print(f"{len(lines)} probes in {out}")
        print(
            f"left out: {left['duplicates']} near-duplicates, {left['no_questions']} lines that are no questions"
        )
    finally:
        mesh.send_signal(signal.SIGTERM)
        mesh.wait()


if __name__ == "__main__":
    os.environ.pop("HEADRACE_DIR", None)
    main()

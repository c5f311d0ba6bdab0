"""Functions over rows as a service: each is a worker of its own in this process, all share one event loop.

The loop does nothing but talk to the broker and to the processes in which the functions run, so that one process
serves many of them, and each has its own queue, batches and processes. If one of them fails, all stop, and whoever
supervises the process starts it again.
"""

from __future__ import annotations

import asyncio
from typing import Final

from msgspec import structs

from headrace.contracts.errors import InvalidInput
from headrace.forge.locate import find_functions
from headrace.forge.plans import plan_of
from headrace.inference_worker.engines.classifier import ClassifyEngine
from headrace.inference_worker.engines.functions import FunctionEngine
from headrace.inference_worker.engines.protocol import Engine
from headrace.inference_worker.service import EngineFactory, WorkerService, engine_of, worker_name
from headrace.mesh.service import Service
from headrace.mesh.settings import Settings, WorkerSettings

CLASSIFY: Final = "classify"
GENERATE: Final = "generate"
NAME_LENGTH: Final = 128


class FunctionsService(Service):
    """Serves what `worker.functions` names. Start and stop are those of each worker, side by side."""

    name = "worker"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        hosted = hosted_functions(settings)
        base = settings.worker.name or worker_name()
        self.workers = [
            WorkerService(_named(settings, function, base, alone=len(hosted) == 1), factory)
            for function, factory in hosted.items()
        ]
        self._stops: list[asyncio.Task[None]] = []

    async def on_start(self) -> None:
        """Start every worker, then watch them."""
        for worker in self.workers:
            await worker.start()
            self.spawn(self._watch(worker), f"worker of {worker.settings.worker.function}")

    async def on_drain(self) -> None:
        """Let every worker stop, in its own order and grace."""
        await asyncio.wait(self._stopping())

    async def on_stop(self) -> None:
        """Wait for their last steps."""
        if self.workers:
            await asyncio.wait(self._stopping())

    def _stopping(self) -> list[asyncio.Task[None]]:
        if not self._stops:
            loop = asyncio.get_running_loop()
            self._stops = [loop.create_task(worker.stop()) for worker in self.workers]
        return self._stops

    async def _watch(self, worker: WorkerService) -> None:
        await worker.run_until_stopped()
        if not self.stopping.is_set():
            raise worker.failure or RuntimeError(f"the worker of {worker.settings.worker.function} stopped")


def check_functions(names: str) -> None:
    """Raise what a worker of these functions would raise at its start: a module that is not there, a name twice."""
    hosted_functions(Settings(worker=WorkerSettings(functions=names)))


def hosted_functions(settings: Settings) -> dict[str, EngineFactory]:
    """The functions that the settings name, each with what makes its engine. Raise what `find_functions` raises."""
    names = [part.strip() for part in settings.worker.functions.split(",") if part.strip()]
    found: dict[str, EngineFactory] = {}
    if CLASSIFY in names:
        found[CLASSIFY] = lambda worker: ClassifyEngine(engine_of(worker))
    if GENERATE in names:
        found[GENERATE] = engine_of
    others = ",".join(name for name in names if name not in (CLASSIFY, GENERATE))
    for function in find_functions(others) if others or not found else []:
        if function.name in found:
            raise InvalidInput(
                f"two functions are named {function.name!r}", field="functions", code="same_name"
            )
        plan = plan_of(function, settings, serving=True)

        def make(_: WorkerSettings, function=function, plan=plan) -> Engine:  # noqa: ANN001  # pyright: ignore[reportMissingParameterType, reportUnknownParameterType]
            return FunctionEngine(function, plan)  # pyright: ignore[reportUnknownArgumentType]

        found[function.name] = make
    return found


def _named(settings: Settings, function: str, base: str, *, alone: bool) -> Settings:
    """The settings of one worker: its function, and a name that no other has."""
    name = base if alone else f"{base[: NAME_LENGTH - len(function[:64]) - 1]}-{function[:64]}"
    return structs.replace(settings, worker=structs.replace(settings.worker, function=function, name=name))

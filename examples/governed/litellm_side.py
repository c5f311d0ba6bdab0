"""The same calls by way of LiteLLM's proxy, two of them behind a balancer, called by the OpenAI SDK as it comes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from pathlib import Path

from litellm_proxy import Proxy
from parts import HERE, Callee, Plan, say
from sides import Side

LIMIT_S = 900.0


async def run(folder: Path, plan: Plan, python: Path) -> Side:
    """Make the calls, kill proxies as planned, and compare what the callers know with the callee's log."""
    side = Side(f"LiteLLM {Proxy.version(python).split()[0]}", plan.calls)
    with contextlib.ExitStack() as stack:
        callee = stack.enter_context(Callee(folder))
        proxies = [Proxy(python, folder / f"proxy-{i}", callee.url) for i in (1, 2)]
        for proxy in proxies:
            stack.callback(proxy.kill)
        await asyncio.gather(*(asyncio.to_thread(proxy.start) for proxy in proxies))
        balancer = await Balancer.start([proxy.port for proxy in proxies])
        began = time.monotonic()
        command = [str(python), str(HERE / "openai_callers.py"), balancer.url, str(plan.callers)]
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {
            "OPENAI_API_KEY": Proxy.key
        }
        client = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=environment
        )
        feeding = asyncio.create_task(_feed(client.stdin, side, proxies, callee, plan))
        try:
            async with asyncio.timeout(LIMIT_S):
                output = await client.stdout.read() if client.stdout else b""
                await feeding
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)
            with contextlib.suppress(ProcessLookupError):
                client.kill()
            await client.wait()
            balancer.close()
        side.seconds = time.monotonic() - began
        told = [json.loads(line) for line in output.splitlines()]
        times = callee.times()
    if len(told) != plan.calls:
        raise RuntimeError(f"the callers told of {len(told)} calls only")
    answered = {t["call"] for t in told if t["ok"]}
    failed = {t["call"] for t in told if not t["ok"]}
    side.done = times.total()
    side.doubled = sorted(name for name, count in times.items() if count > 1)
    side.answered, side.failed = len(answered), len(failed)
    side.failed_done = sum(1 for name in failed if times[name])
    # Each answer is of one doing. Of the others nobody knows: without a database the proxy keeps no record.
    side.unrecorded = side.done - sum(1 for name in answered if times[name])
    return side


async def _feed(
    callers: asyncio.StreamWriter | None, side: Side, proxies: list[Proxy], callee: Callee, plan: Plan
) -> None:
    """Give the callers their calls, and kill the proxies in turn, each when so many calls are done.

    A proxy takes seconds to start. Further calls are given out when it is there again, so that no call fails for want
    of a proxy: that is not what this is about.
    """
    if callers is None:
        return
    given = 0
    marks = plan.marks(plan.kills)
    for n, mark in enumerate([*marks, plan.calls]):
        upto = min(plan.calls, mark + plan.callers)
        callers.writelines(b"call-%d\n" % number for number in range(given, upto))
        given = max(given, upto)
        if n < len(marks):
            await callee.has_done(mark, asyncio.Event())
            proxies[n % 2].kill()
            say(f"  LiteLLM's proxy: SIGKILL with {callee.count():,} calls done")
            side.kills["proxy"] = n + 1
            await asyncio.to_thread(proxies[n % 2].start)
    callers.close()


class Balancer:
    """Passes each connection on to the next server that takes one, as any balancer before two replicas does."""

    def __init__(self, ports: list[int]) -> None:
        self._ports = ports
        self._next = 0
        self._server: asyncio.Server | None = None

    @classmethod
    async def start(cls, ports: list[int]) -> Balancer:
        """Listen on a free port."""
        balancer = cls(ports)
        balancer._server = await asyncio.start_server(balancer._serve, "127.0.0.1", 0)
        return balancer

    @property
    def url(self) -> str:
        """Its address."""
        sockets = self._server.sockets if self._server else ()
        return f"http://127.0.0.1:{sockets[0].getsockname()[1]}"

    def close(self) -> None:
        """Take no more connections."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            for _ in self._ports:
                self._next += 1
                port = self._ports[self._next % len(self._ports)]
                with contextlib.suppress(OSError):
                    back, forth = await asyncio.open_connection("127.0.0.1", port)
                    await asyncio.gather(_pass(reader, forth), _pass(back, writer))
                    return
        finally:
            writer.close()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass bytes on; what ends or breaks on one side ends the other."""
    try:
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()

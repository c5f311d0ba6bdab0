"""Callers that use the OpenAI SDK as it comes: its time-outs, and its two retries of whatever broke.

`PYTHON openai_callers.py URL CALLERS`, in LiteLLM's environment, which has the SDK. A call for each line of standard
input (what is asked), and a line of JSON on standard output for each of them.
"""

import asyncio
import json
import sys

import openai


async def main(url: str, callers: int) -> None:
    """Make the calls."""
    client = openai.AsyncOpenAI(base_url=f"{url}/v1")  # and its key from the environment
    lines = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(lines)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    taking = asyncio.Lock()

    async def caller() -> None:
        while True:
            async with taking:
                name = (await lines.readline()).decode().strip()
            if not name:
                return
            error = ""
            try:
                messages = [{"role": "user", "content": name}]
                answer = await client.chat.completions.create(model="m", messages=messages)
                ok = answer.choices[0].message.content == f"done: {name}"
            except openai.OpenAIError as e:
                ok, error = False, type(e).__name__
            print(json.dumps({"call": name, "ok": ok, "error": error}), flush=True)

    await asyncio.gather(*(caller() for _ in range(callers)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))

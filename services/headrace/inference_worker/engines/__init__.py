"""Engines behind one protocol (`protocol.Engine`): `echo`, `sim`, `llamacpp` and `vllm`.

Nothing here is imported until it is asked for by name: see `registry.create_engine`.
"""

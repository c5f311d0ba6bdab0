"""Checks of a mesh that services and `headrace doctor` share: each looks at one thing and says how to mend it.

`stream_rules` and `consumer_rules` are tables over what JetStream reports; docs/doctor.md is made from them.
"""
